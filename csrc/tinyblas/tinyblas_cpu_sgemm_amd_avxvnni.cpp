#define KT_TIER amd_avxvnni
#include "simd/avxvnni_dot.h"

#include "peaks.h"
#include "sgemm.h"
