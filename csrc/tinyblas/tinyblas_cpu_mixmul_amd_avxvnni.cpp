#define KT_TIER amd_avxvnni
#include "simd/avxvnni_dot.h"

#include "mixmul.h"
