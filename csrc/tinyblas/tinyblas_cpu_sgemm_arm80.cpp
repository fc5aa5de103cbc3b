#define KT_TIER arm80
#include "simd/arm80_dot.h"

#include "peaks.h"
#include "sgemm.h"
