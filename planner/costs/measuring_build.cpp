#include "planner/costs/measuring_build.h"

#include <fmt/core.h>

#include "common/channel.h"
#include "planner/costs/digest_of_work.h"

namespace poise {

std::string measuring_build() {
  return fmt::format("{}, work {}, {}", build_id(), kDigestOfWork, POISE_COMPILED_AS);
}

}  // namespace poise
