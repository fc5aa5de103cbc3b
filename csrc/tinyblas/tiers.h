// The tiers compiled into this library, best first.
#pragma once

#include "tinyblas.h"

namespace ktlinear::tinyblas {

const Tier* tiers(int* count);

}  // namespace ktlinear::tinyblas
