#include "common/families/config_fields.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::array<std::pair<std::string_view, Activation>, 10> kActivations{{
    {"relu", Activation::relu},
    {"gelu", Activation::gelu},
    {"gelu_python", Activation::gelu},
    {"gelu_new", Activation::gelu_tanh},
    {"gelu_pytorch_tanh", Activation::gelu_tanh},
    {"gelu_python_tanh", Activation::gelu_tanh},
    {"gelu_accurate", Activation::gelu_tanh},
    {"gelu_fast", Activation::gelu_tanh},
    {"silu", Activation::silu},
    {"swish", Activation::silu},
}};

}  // namespace

std::int32_t size_field(const JsonObject& config, std::string_view name, std::int64_t otherwise,
                        std::int64_t max) {
  return static_cast<std::int32_t>(
      config.integer(name, {.min = 1, .max = max}).value_or(otherwise));
}

std::uint32_t switch_field(const JsonObject& config, std::string_view name, bool otherwise) {
  return config.boolean(name).value_or(otherwise) ? 1 : 0;
}

float epsilon_field(const JsonObject& config, std::string_view name, double otherwise) {
  return static_cast<float>(config.number(name, {.min = 0, .max = 1}).value_or(otherwise));
}

Activation activation_field(const JsonObject& config, std::string_view field,
                            std::string_view otherwise) {
  const std::string name = config.string(field).value_or(std::string(otherwise));
  const auto* known = std::ranges::find(kActivations, std::string_view(name),
                                        &std::pair<std::string_view, Activation>::first);
  if (known == kActivations.end()) {
    config.refuse(field, fmt::format("is \"{}\"; supported are relu, gelu, gelu_new, "
                                     "gelu_pytorch_tanh, silu and their synonyms",
                                     shown(name)));
  }
  return known->second;
}

std::int32_t divided_head_dim(const JsonObject& config, const ModelShape& shape,
                              std::string_view hidden_size, std::string_view heads) {
  if (shape.hidden_size % shape.num_attention_heads != 0) {
    config.refuse(hidden_size, fmt::format("is {}, which {} attention heads (\"{}\") do not divide",
                                           shape.hidden_size, shape.num_attention_heads, heads));
  }
  const std::int32_t width = shape.hidden_size / shape.num_attention_heads;
  if (width > kMaxHeadDim) {
    config.refuse(heads, fmt::format("is {}: heads are then {} wide, and at most {} is computed",
                                     shape.num_attention_heads, width, kMaxHeadDim));
  }
  return width;
}

void need_switch(const JsonObject& config, std::string_view name, bool needed,
                 std::string_view reason) {
  if (config.boolean(name).value_or(needed) != needed) {
    config.refuse(name, fmt::format("is {}: {}", !needed, reason));
  }
}

void need_absent(const JsonObject& config, std::string_view name, std::string_view reason) {
  if (config.has(name)) {
    config.refuse(name, fmt::format("is there: {}", reason));
  }
}

}  // namespace poise
