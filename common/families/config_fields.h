#pragma once
// Fields that the config.json of several families have, each read with its bounds. Sizes are bounded so
// that products of two fit 64 bits. A bad value is refused with a sentence that names file and field.
// Pure functions.

#include <cstdint>
#include <string_view>

#include "common/files/json_file.h"
#include "common/kernel_limits.h"
#include "common/model_shape.h"

namespace poise {

// Far above any model there is, far below what makes the product of two sizes overflow.
inline constexpr std::int64_t kMaxLayers = kMaxModelLayers;
inline constexpr std::int64_t kMaxWidth = 1 << 16;
inline constexpr std::int64_t kMaxFfn = 1 << 18;
inline constexpr std::int64_t kMaxVocabulary = 1 << 23;
inline constexpr std::int64_t kMaxPositions = 1 << 24;

// 1 to `max`; an absent field is `otherwise`.
std::int32_t size_field(const JsonObject& config, std::string_view name, std::int64_t otherwise,
                        std::int64_t max);
std::uint32_t switch_field(const JsonObject& config, std::string_view name, bool otherwise);
float epsilon_field(const JsonObject& config, std::string_view name, double otherwise);
Activation activation_field(const JsonObject& config, std::string_view name,
                            std::string_view otherwise);
// hidden_size / num_attention_heads; fails, naming the two fields, where that leaves a rest or heads that no
// kernel computes.
std::int32_t divided_head_dim(const JsonObject& config, const ModelShape& shape,
                              std::string_view hidden_size, std::string_view heads);
// Fails where the switch `name` is not as `needed`, with a reason: "experts are not supported".
void need_switch(const JsonObject& config, std::string_view name, bool needed,
                 std::string_view reason);
// Fails where the field is there and not null: what it asks for is not built.
void need_absent(const JsonObject& config, std::string_view name, std::string_view reason);

}  // namespace poise
