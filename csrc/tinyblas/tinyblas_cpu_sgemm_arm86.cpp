#define KT_TIER arm86
#include "simd/arm86_dot.h"

#include "peaks.h"
#include "sgemm.h"
