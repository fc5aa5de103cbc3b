#define KT_TIER amd_avx
#include "simd/avx_int.h"
#include "simd/avx_plain.h"

#include "quantize.h"
