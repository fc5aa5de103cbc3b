#define KT_TIER unsupported
#include "simd/portable.h"

#include "quantize.h"
