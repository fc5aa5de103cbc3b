#define KT_TIER amd_fma
#include "simd/avx_int.h"
#include "simd/f16c_fma.h"

#include "limits.h"
#include "sgemm.h"
