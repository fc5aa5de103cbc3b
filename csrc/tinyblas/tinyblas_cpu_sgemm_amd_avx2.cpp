#define KT_TIER amd_avx2
#include "simd/avx2_dot.h"

#include "limits.h"
#include "sgemm.h"
