#include <array>

#include "common/families/family.h"

namespace poise {

extern const Family kOpt, kLlama, kMistral, kQwen2, kQwen3, kGpt2;

std::span<const Family* const> families() {
  static constexpr std::array<const Family*, 6> kAll{&kOpt,   &kLlama, &kMistral,
                                                     &kQwen2, &kQwen3, &kGpt2};
  return kAll;
}

}  // namespace poise
