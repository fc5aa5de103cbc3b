#define KT_TIER arm86
#include "simd/arm86_dot.h"

#include "mixmul.h"
