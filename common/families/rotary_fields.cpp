#include "common/families/rotary_fields.h"

#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "common/families/config_fields.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr double kDefaultTheta = 10000;
constexpr double kMaxTheta = 1e12;
constexpr double kMaxFactor = 1e6;
// The CPU's sine and cosine are exact up to it (kernels.h); blocks end up to 15 positions later.
constexpr std::int64_t kMaxRotaryPositions = (1 << 20) - 16;

constexpr std::array<std::pair<std::string_view, RotaryKind>, 6> kRotaryKinds{{
    {"default", RotaryKind::plain},
    {"linear", RotaryKind::linear},
    {"dynamic", RotaryKind::dynamic},
    {"yarn", RotaryKind::yarn},
    {"longrope", RotaryKind::longrope},
    {"llama3", RotaryKind::llama3},
}};

// The object that speaks of scaling, if there is one.
std::optional<JsonObject> rotary_object(const JsonObject& config) {
  for (const std::string_view name : {"rope_scaling", "rope_parameters"}) {
    if (config.has(name) && !config.object(name)->json().empty()) {
      std::optional<JsonObject> object = config.object(name);
      for (const auto& [key, value] : object->json().items()) {
        if (value.is_object()) {
          config.refuse(name, fmt::format("holds an object (\"{}\"): positions that differ by "
                                          "layer are not supported",
                                          shown(key)));
        }
      }
      return object;
    }
  }
  return std::nullopt;
}

// "default, linear … and llama3"
std::string rotary_names() {
  std::string names;
  for (const auto& [name, kind] : kRotaryKinds) {
    const bool last = name == kRotaryKinds.back().first;
    names += fmt::format("{}{}", names.empty() ? "" : last ? " and " : ", ", name);
  }
  return names;
}

RotaryKind kind_of(const JsonObject& rotary) {
  for (const std::string_view field : {"rope_type", "type"}) {
    if (const auto name = rotary.string(field)) {
      for (const auto& [known, kind] : kRotaryKinds) {
        if (known == *name) {
          return kind;
        }
      }
      rotary.refuse(field,
                    fmt::format("is \"{}\"; supported are {}", shown(*name), rotary_names()));
    }
  }
  return RotaryKind::plain;
}

double needed(const JsonObject& rotary, std::string_view name, JsonObject::Numbers range) {
  const auto value = rotary.number(name, range);
  if (!value) {
    rotary.refuse(name, "is missing: this kind of rotary positions needs it");
  }
  return *value;
}

double magnitude(double factor, double scale) {
  return factor <= 1 ? 1 : 0.1 * scale * std::log(factor) + 1;
}

void read_yarn(const JsonObject& object, double factor, RotaryShape& rotary) {
  const JsonObject::Numbers any{.min = 0, .max = kMaxFactor};
  const double mscale = object.number("mscale", any).value_or(0);
  const double all = object.number("mscale_all_dim", any).value_or(0);
  const double inferred = mscale != 0 && all != 0
                              ? magnitude(factor, mscale) / magnitude(factor, all)
                              : magnitude(factor, 1);
  rotary.scale = static_cast<float>(object.number("attention_factor", any).value_or(inferred));
  const auto turns = [&](std::string_view name, double otherwise) {
    const double given = object.number(name, any).value_or(0);
    return static_cast<float>(given == 0 ? otherwise : given);
  };
  rotary.beta_fast = turns("beta_fast", 32);
  rotary.beta_slow = turns("beta_slow", 1);
  rotary.truncate = switch_field(object, "truncate", true);
  if (rotary.theta == 1) {
    object.refuse("rope_theta", "is 1: yarn divides by its logarithm");
  }
}

void read_factors(const JsonObject& object, std::string_view name, std::int32_t pairs,
                  float* factors) {
  const nlohmann::json* list = object.find(name);
  if (list == nullptr || !list->is_array() || std::ssize(*list) != pairs) {
    object.refuse(name,
                  fmt::format("must be a list of {} numbers, half the width of a head", pairs));
  }
  for (const nlohmann::json& factor : *list) {
    if (!factor.is_number() || !(factor.get<double>() > 0 && factor.get<double>() < kMaxFactor)) {
      object.refuse(name, "must hold numbers above 0, not " + described(factor));
    }
    *factors++ = factor.get<float>();
  }
}

void read_longrope(const JsonObject& object, double factor, RotaryShape& rotary) {
  const double original = rotary.original_max_position_embeddings;
  const double inferred =
      factor <= 1 || original <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(original));
  const auto given = object.number("attention_factor", {.min = 0, .max = kMaxFactor});
  rotary.scale = static_cast<float>(given.value_or(inferred));
  read_factors(object, "short_factor", rotary.dim / 2, rotary.short_factor);
  read_factors(object, "long_factor", rotary.dim / 2, rotary.long_factor);
}

void read_llama3(const JsonObject& object, RotaryShape& rotary) {
  const JsonObject::Numbers positive{.min = 1e-6, .max = kMaxFactor};
  rotary.low_freq_factor = static_cast<float>(needed(object, "low_freq_factor", positive));
  rotary.high_freq_factor = static_cast<float>(needed(object, "high_freq_factor", positive));
  if (rotary.high_freq_factor <= rotary.low_freq_factor) {
    object.refuse("high_freq_factor", fmt::format("is {}, not above \"low_freq_factor\", {}",
                                                  rotary.high_freq_factor, rotary.low_freq_factor));
  }
}

void check_whole_heads(const JsonObject& object) {
  const double share = object.number("partial_rotary_factor", {.min = 0, .max = 1}).value_or(1);
  if (share != 1) {
    object.refuse("partial_rotary_factor",
                  fmt::format("is {}: heads that are rotated in part are not supported", share));
  }
}

void read_scaling(const JsonObject& config, const JsonObject& object, ModelShape& shape) {
  RotaryShape& rotary = shape.rotary;
  const double longest = shape.max_position_embeddings;
  if (rotary.kind == RotaryKind::yarn || rotary.kind == RotaryKind::longrope ||
      rotary.kind == RotaryKind::llama3) {
    const JsonObject& from = config.has("original_max_position_embeddings") ? config : object;
    rotary.original_max_position_embeddings = size_field(
        from, "original_max_position_embeddings", shape.max_position_embeddings, kMaxPositions);
  }
  const JsonObject::Numbers factors{.min = 1e-3, .max = kMaxFactor};
  const bool by_lengths = rotary.kind == RotaryKind::yarn || rotary.kind == RotaryKind::longrope;
  const double factor = by_lengths
                            ? object.number("factor", factors)
                                  .value_or(longest / rotary.original_max_position_embeddings)
                            : needed(object, "factor", factors);
  rotary.factor = static_cast<float>(factor);
  if (rotary.kind == RotaryKind::yarn) {
    read_yarn(object, factor, rotary);
  } else if (rotary.kind == RotaryKind::longrope) {
    read_longrope(object, factor, rotary);
  } else if (rotary.kind == RotaryKind::llama3) {
    read_llama3(object, rotary);
  } else if (rotary.kind == RotaryKind::dynamic) {
    if (factor < 1 || rotary.dim <= 2) {
      object.refuse("factor",
                    fmt::format("is {} for heads of {}: dynamic positions need at least 1, "
                                "and heads wider than 2",
                                factor, rotary.dim));
    }
    shape.max_position_embeddings = static_cast<std::int32_t>(
        std::min(std::floor(longest * factor), static_cast<double>(kMaxRotaryPositions)));
  }
}

}  // namespace

void read_rotary(const JsonObject& config, ModelShape& shape) {
  if (shape.head_dim % 2 != 0 || shape.head_dim > 2 * kMaxRotaryPairs) {
    config.refuse("head_dim", fmt::format("is {}: heads that are rotated have an even width of at "
                                          "most {}",
                                          shape.head_dim, 2 * kMaxRotaryPairs));
  }
  if (shape.max_position_embeddings > kMaxRotaryPositions) {
    config.refuse("max_position_embeddings",
                  fmt::format("is {}; rotary positions reach to {}", shape.max_position_embeddings,
                              kMaxRotaryPositions));
  }
  check_whole_heads(config);
  const std::optional<JsonObject> object = rotary_object(config);
  RotaryShape& rotary = shape.rotary;
  rotary.kind = object ? kind_of(*object) : RotaryKind::plain;
  rotary.dim = shape.head_dim;
  rotary.original_max_position_embeddings = shape.max_position_embeddings;
  const JsonObject::Numbers thetas{.min = 1, .max = kMaxTheta};
  const double outside = config.number("rope_theta", thetas).value_or(kDefaultTheta);
  rotary.theta =
      static_cast<float>(object ? object->number("rope_theta", thetas).value_or(outside) : outside);
  if (object) {
    check_whole_heads(*object);
  }
  if (rotary.kind != RotaryKind::plain) {
    read_scaling(config, *object, shape);
  }
}

}  // namespace poise
