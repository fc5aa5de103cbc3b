#define KT_TIER amd_zen4
#include "simd/avx512bf16_dot.h"
#include "simd/avx512vnni_dot.h"

#include "peaks.h"
#include "sgemm.h"
