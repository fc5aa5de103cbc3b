#define KT_TIER amd_avxvnni
#include "simd/avxvnni_dot.h"

#include "limits.h"
#include "sgemm.h"
