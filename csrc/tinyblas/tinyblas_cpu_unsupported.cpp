// Portable C++, for CPUs without a tier of their own; the oracle of the others' tests.
#define KT_TIER unsupported
#include "simd/portable.h"

#include "mixmul.h"
#include "peaks.h"
#include "sgemm.h"
