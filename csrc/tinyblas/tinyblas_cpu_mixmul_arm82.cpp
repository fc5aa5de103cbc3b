#define KT_TIER arm82
#include "simd/arm82_dot.h"

#include "mixmul.h"
