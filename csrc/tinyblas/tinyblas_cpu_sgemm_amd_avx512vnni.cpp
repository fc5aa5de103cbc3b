#define KT_TIER amd_avx512vnni
#include "simd/avx512vnni_dot.h"

#include "peaks.h"
#include "sgemm.h"
