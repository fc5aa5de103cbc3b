#define KT_TIER amd_avx2
#include "simd/avx2_dot.h"

#include "peaks.h"
#include "sgemm.h"
