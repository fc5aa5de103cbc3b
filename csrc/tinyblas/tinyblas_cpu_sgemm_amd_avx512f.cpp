#define KT_TIER amd_avx512f
#include "simd/avx512f_dot.h"

#include "peaks.h"
#include "sgemm.h"
