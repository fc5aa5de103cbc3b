#define KT_TIER amd_avx512f
#include "simd/avx512.h"

#include "quantize.h"
