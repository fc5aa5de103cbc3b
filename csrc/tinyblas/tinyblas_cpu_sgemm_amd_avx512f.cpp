#define KT_TIER amd_avx512f
#include "simd/avx512f_dot.h"

#include "limits.h"
#include "sgemm.h"
