#include "loader/opt_tensors.h"

#include <array>
#include <utility>

#include "common/files/regular_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::array<std::string_view, 3> kPrefixes{"model.decoder.", "decoder.", ""};

// Within the prefix for outer weights, within "layers.N." for those of a layer. `w_kv` and `b_kv`
// are two tensors each.
std::string_view opt_name(Weight weight) {
  switch (weight) {
    case Weight::token_embedding:
      return "embed_tokens.weight";
    case Weight::position_embedding:
      return "embed_positions.weight";
    case Weight::project_in:
      return "project_in.weight";
    case Weight::project_out:
      return "project_out.weight";
    case Weight::final_norm_weight:
      return "final_layer_norm.weight";
    case Weight::final_norm_bias:
      return "final_layer_norm.bias";
    case Weight::head:
      return kHeadName;
    case Weight::attention_norm_weight:
      return "self_attn_layer_norm.weight";
    case Weight::attention_norm_bias:
      return "self_attn_layer_norm.bias";
    case Weight::w_q:
      return "self_attn.q_proj.weight";
    case Weight::b_q:
      return "self_attn.q_proj.bias";
    case Weight::w_o:
      return "self_attn.out_proj.weight";
    case Weight::b_o:
      return "self_attn.out_proj.bias";
    case Weight::mlp_norm_weight:
      return "final_layer_norm.weight";  // of the layer; the same name as the last norm's
    case Weight::mlp_norm_bias:
      return "final_layer_norm.bias";
    case Weight::fc1:
      return "fc1.weight";
    case Weight::fc1_bias:
      return "fc1.bias";
    case Weight::fc2:
      return "fc2.weight";
    case Weight::fc2_bias:
      return "fc2.bias";
    case Weight::w_kv:
    case Weight::b_kv:
    case Weight::k_norm:
    case Weight::q_norm:
      break;
  }
  check(false, "a fused weight has no name of its own");
  return "";
}

std::int64_t product(const std::vector<std::int64_t>& shape) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    elements *= size;
  }
  return elements;
}

// The tensors of one slab that begins at `start` of the segment.
void add_slab(std::vector<WeightTensor>& tensors, const Slab& slab, std::uint32_t number,
              std::uint64_t start, const std::string& prefix) {
  const auto add = [&](Weight weight, std::string name, std::vector<std::int64_t> shape,
                       std::uint64_t offset) {
    const std::int64_t elements = product(shape);
    tensors.push_back({.weight = weight,
                       .slab = number,
                       .name = std::move(name),
                       .shape = std::move(shape),
                       .offset = start + offset,
                       .elements = elements});
  };
  for (const WeightEntry& entry : slab.entries) {
    const auto half = static_cast<std::uint64_t>(entry.bytes.n / 2);
    if (entry.weight == Weight::w_kv) {
      const std::vector<std::int64_t> shape{entry.rows / 2, entry.cols};
      add(entry.weight, prefix + "self_attn.k_proj.weight", shape, entry.offset);
      add(entry.weight, prefix + "self_attn.v_proj.weight", shape, entry.offset + half);
    } else if (entry.weight == Weight::b_kv) {
      const std::vector<std::int64_t> shape{entry.cols / 2};
      add(entry.weight, prefix + "self_attn.k_proj.bias", shape, entry.offset);
      add(entry.weight, prefix + "self_attn.v_proj.bias", shape, entry.offset + half);
    } else if (entry.weight == Weight::head) {
      add(entry.weight, std::string(kHeadName), {entry.rows, entry.cols}, entry.offset);
    } else if (is_vector(entry.weight)) {
      add(entry.weight, fmt::format("{}{}", prefix, opt_name(entry.weight)), {entry.cols},
          entry.offset);
    } else {
      add(entry.weight, fmt::format("{}{}", prefix, opt_name(entry.weight)),
          {entry.rows, entry.cols}, entry.offset);
    }
  }
}

}  // namespace

std::string opt_prefix(const Checkpoint& checkpoint, const std::string& what) {
  const std::string_view* found = nullptr;
  for (const std::string_view& prefix : kPrefixes) {
    if (checkpoint.find(fmt::format("{}embed_tokens.weight", prefix)) == nullptr) {
      continue;
    }
    if (found != nullptr) {
      fail("{}: holds both {}embed_tokens.weight and {}embed_tokens.weight: which model is meant?",
           what, *found, prefix);
    }
    found = &prefix;
  }
  if (found == nullptr) {
    fail(
        "{}: no tensor is named {}embed_tokens.weight (nor without \"model.\"): the weights are "
        "not those of an OPT model",
        what, kPrefixes.front());
  }
  return std::string(*found);
}

std::vector<WeightTensor> opt_tensors(const WeightLayout& layout, std::string_view prefix) {
  std::vector<WeightTensor> tensors;
  add_slab(tensors, layout.outer, 0, 0, std::string(prefix));
  for (std::int32_t layer = 0; layer < layout.layers; ++layer) {
    const LayerId id{static_cast<std::uint32_t>(layer)};
    add_slab(tensors, layout.layer, id.n + 1, layout.layer_offset(id),
             fmt::format("{}layers.{}.", prefix, layer));
  }
  return tensors;
}

}  // namespace poise
