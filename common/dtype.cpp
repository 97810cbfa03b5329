#include "common/dtype.h"

#include <array>

namespace poise {

std::string_view name_of(DType type) {
  constexpr std::array<std::string_view, 3> names{"float32", "float16", "bfloat16"};
  return names[static_cast<std::size_t>(type)];
}

std::optional<DType> dtype_from(std::string_view name) {
  if (name.starts_with("torch.")) {
    name.remove_prefix(6);
  }
  if (name == "float32" || name == "float" || name == "F32") {
    return DType::float32;
  }
  if (name == "float16" || name == "half" || name == "F16") {
    return DType::float16;
  }
  if (name == "bfloat16" || name == "BF16") {
    return DType::bfloat16;
  }
  return std::nullopt;
}

}  // namespace poise
