#define KT_TIER arm82
#include "simd/arm82_dot.h"

#include "peaks.h"
#include "sgemm.h"
