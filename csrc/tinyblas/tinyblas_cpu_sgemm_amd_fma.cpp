#define KT_TIER amd_fma
#include "simd/avx_int.h"
#include "simd/f16c_fma.h"

#include "peaks.h"
#include "sgemm.h"
