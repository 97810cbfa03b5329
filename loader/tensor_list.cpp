#include "loader/tensor_list.h"

#include <algorithm>
#include <span>
#include <utility>

#include "common/files/regular_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

// A slab of the segment, and the names of its tensors.
struct NamedSlab {
  const Slab& slab;
  std::span<const TensorName> names;
  std::uint32_t number;
  std::uint64_t start;  // bytes of the segment
  std::string prefix;
  bool inputs_first;  // matrices are stored (in, out)
};

// Outputs of a tensor that holds queries, keys and values.
std::int64_t fused_outputs(const Slab& slab) {
  const WeightEntry* kv = slab.find(Weight::w_kv);
  const WeightEntry* q = slab.find(Weight::w_q);
  check(kv != nullptr && q != nullptr, "a layer has queries, keys and values");
  return std::int64_t{q->rows} + kv->rows;
}

// `entry`: the weight that the tensor, or a part of it, becomes.
WeightTensor tensor_of(const NamedSlab& named, const WeightEntry& entry, const TensorName& name) {
  const bool matrix = entry.matrix();
  const std::int64_t all_rows = matrix ? entry.rows : entry.cols;
  const std::int64_t rows = name.rows == RowsFilled::all ? all_rows : all_rows / 2;
  const std::int64_t inputs = matrix ? entry.cols : 1;
  const std::int64_t outputs = name.outputs == OutputsTaken::all ? rows : fused_outputs(named.slab);
  const auto half = static_cast<std::uint64_t>(entry.bytes.n / 2);
  WeightTensor tensor{
      .weight = entry.weight,
      .slab = named.number,
      .name = entry.weight == Weight::head ? std::string(kHeadName)
                                           : fmt::format("{}{}", named.prefix, name.name),
      .shape = {outputs},
      .first_output = name.outputs == OutputsTaken::keys_values ? outputs - rows : 0,
      .inputs_first = matrix && named.inputs_first,
      .offset = named.start + entry.offset + (name.rows == RowsFilled::lower ? half : 0),
      .elements = rows * inputs,
      .unit = entry.bytes /
              (entry.packed ? entry.rows / kPackedRows : std::int64_t{entry.rows} * entry.cols),
      .units = entry.packed ? rows / kPackedRows : rows * inputs,
      .packed = entry.packed};
  if (matrix) {
    tensor.shape.insert(tensor.inputs_first ? tensor.shape.begin() : tensor.shape.end(), inputs);
  }
  return tensor;
}

// The weight whose tensors' names an entry has.
Weight named_as(Weight weight) {
  const auto found = std::ranges::find(kLayerMatrices, weight, groups_of);
  return found == std::end(kLayerMatrices) ? weight : *found;
}

void add_slab(std::vector<WeightTensor>& tensors, const NamedSlab& named) {
  for (const WeightEntry& entry : named.slab.entries) {
    const std::size_t before = tensors.size();
    if (entry.weight == Weight::head) {
      tensors.push_back(tensor_of(named, entry, {.weight = Weight::head, .name = kHeadName}));
    }
    for (const TensorName& name : named.names) {
      if (name.weight == named_as(entry.weight)) {
        tensors.push_back(tensor_of(named, entry, name));
      }
    }
    check(tensors.size() > before, "a family names the tensors of every weight it has");
  }
}

}  // namespace

bool is_groups(Weight weight) { return named_as(weight) != weight; }

std::string_view embedding_name(const Family& family) {
  const auto found = std::ranges::find(family.outer, Weight::token_embedding, &TensorName::weight);
  check(found != family.outer.end(), "a family names its token embedding");
  return found->name;
}

std::string tensor_prefix(const Family& family, const Checkpoint& checkpoint,
                          const std::string& what) {
  const std::string_view embedding = embedding_name(family);
  const std::string_view* found = nullptr;
  for (const std::string_view& prefix : family.prefixes) {
    if (checkpoint.find(fmt::format("{}{}", prefix, embedding)) == nullptr) {
      continue;
    }
    if (found != nullptr) {
      fail("{}: holds both {}{} and {}{}: which model is meant?", what, *found, embedding, prefix,
           embedding);
    }
    found = &prefix;
  }
  if (found == nullptr) {
    const std::string_view usual = family.prefixes.front();
    fail(
        "{}: no tensor is named {}{} (nor without \"{}\"): the weights are not those of a model of "
        "type {}",
        what, usual, embedding, usual.substr(0, usual.find('.') + 1), family.model_type);
  }
  return std::string(*found);
}

std::vector<WeightTensor> tensor_list(const Family& family, const WeightLayout& layout,
                                      std::string_view prefix) {
  std::vector<WeightTensor> tensors;
  add_slab(tensors, {.slab = layout.outer,
                     .names = family.outer,
                     .number = 0,
                     .start = 0,
                     .prefix = std::string(prefix),
                     .inputs_first = false});
  for (std::int32_t layer = 0; layer < layout.layers; ++layer) {
    const LayerId id{static_cast<std::uint32_t>(layer)};
    add_slab(tensors, {.slab = layout.layer,
                       .names = family.layer,
                       .number = id.n + 1,
                       .start = layout.layer_offset(id),
                       .prefix = fmt::format("{}{}{}.", prefix, family.layers, layer),
                       .inputs_first = family.inputs_first});
  }
  return tensors;
}

}  // namespace poise
