#include "loader/sources/packed_checkpoint_source.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <utility>

#include "common/families/quantization.h"
#include "common/trouble.h"
#include "loader/conversion.h"
#include "loader/tensor_list.h"

namespace poise {
namespace {

constexpr std::string_view kWords[] = {"I32", "U32"};
constexpr std::string_view kScales[] = {"F32", "F16", "BF16"};
constexpr std::string_view kBytes[] = {"I8", "F8_E4M3"};
constexpr std::array<std::int64_t, 8> kAwqOrder{0, 2, 4, 6, 1, 3, 5, 7};  // outputs of a word

std::int64_t bits_of(const PackedFormat& format) { return format.codes == Codes::int4 ? 4 : 8; }

std::string module_of(const WeightTensor& tensor) {
  return tensor.name.substr(0, tensor.name.rfind('.'));
}

std::string codes_name(StoredCodes stored, const std::string& module) {
  switch (stored) {
    case StoredCodes::gptq:
    case StoredCodes::awq:
      return module + ".qweight";
    case StoredCodes::packed_integers:
      return module + ".weight_packed";
    case StoredCodes::bytes:
      return module + ".weight";
  }
  return module;
}

bool is_quantized(const Checkpoint& checkpoint, StoredCodes stored, const WeightTensor& tensor) {
  if (tensor.shape.size() != 2 || !tensor.name.ends_with(".weight")) {
    return false;
  }
  const TensorPlace* codes = checkpoint.find(codes_name(stored, module_of(tensor)));
  return codes != nullptr && (stored != StoredCodes::bytes ||
                              std::ranges::find(kBytes, codes->tensor->dtype) != std::end(kBytes));
}

std::string scales_name(StoredCodes stored, const Checkpoint& checkpoint,
                        const std::string& module) {
  if (stored == StoredCodes::gptq || stored == StoredCodes::awq) {
    return module + ".scales";
  }
  const std::string inverse = module + ".weight_scale_inv";
  return stored == StoredCodes::bytes && checkpoint.find(inverse) != nullptr
             ? inverse
             : module + ".weight_scale";
}

// All that a module may have beside its bias.
constexpr const char* kParts[] = {
    ".weight",        ".qweight",      ".qzeros",           ".scales",       ".g_idx",
    ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_shape", ".weight_zero_point",
    ".weight_g_idx",  ".input_scale",  ".input_zero_point"};

std::uint32_t word_at(const std::vector<std::byte>& words, std::int64_t at) {
  std::uint32_t word;
  std::memcpy(&word, words.data() + at * 4, 4);
  return word;
}

}  // namespace

ModelShape shape_in_checkpoint(const ModelConfig& model, const CheckpointFormat& format,
                               const Checkpoint& checkpoint, const std::string& what) {
  ModelShape shape = unpacked(model.shape);
  const WeightLayout plain = weight_layout(shape, DType::float32);
  std::uint32_t partly = 0;
  std::set<std::string> scale_types;
  for (const WeightTensor& tensor :
       tensor_list(*model.family, plain, tensor_prefix(*model.family, checkpoint, what))) {
    if (!is_quantized(checkpoint, format.stored, tensor)) {
      partly |= bit_of(tensor.weight);
      continue;
    }
    shape.packed_weights |= bit_of(tensor.weight);
    const TensorPlace* scales =
        checkpoint.find(scales_name(format.stored, checkpoint, module_of(tensor)));
    scale_types.insert(scales == nullptr ? "F32" : scales->tensor->dtype);
  }
  shape.packed_weights &= packable_weights(shape) & ~partly;
  if (shape.packed_weights != 0) {
    shape.packed = format.packed;
    shape.packed.scale_dtype = scale_types.size() == 1
                                   ? dtype_from(*scale_types.begin()).value_or(DType::float32)
                                   : DType::float32;
  }
  return shape;
}

PackedCheckpointSource::PackedCheckpointSource(std::shared_ptr<const Checkpoint> checkpoint,
                                               const ModelConfig& model,
                                               const CheckpointFormat& format,
                                               const WeightLayout& layout, DType dtype,
                                               std::string what)
    : checkpoint_(std::move(checkpoint)),
      format_(format),
      packed_(model.shape.packed),
      dtype_(dtype),
      what_(std::move(what)),
      tensors_(
          tensor_list(*model.family, layout, tensor_prefix(*model.family, *checkpoint_, what_))) {
  std::set<std::string> others;
  for (const WeightTensor& tensor : tensors_) {
    const std::string name = module_of(tensor);
    if (!is_quantized(*checkpoint_, format_.stored, tensor) ||
        std::ranges::find(modules_, name, &Module::name) != modules_.end()) {
      continue;
    }
    const bool turned = tensor.inputs_first;
    modules_.push_back(open(name, turned ? tensor.shape.back() : tensor.shape.front(),
                            turned ? tensor.shape.front() : tensor.shape.back()));
    for (const char* part : kParts) {
      others.insert(name + part);
    }
  }
  std::vector<WeightTensor> plain;
  for (const WeightTensor& tensor : tensors_) {
    if (is_quantized(*checkpoint_, format_.stored, tensor) || is_groups(tensor.weight)) {
      const auto module = std::ranges::find(modules_, module_of(tensor), &Module::name);
      check(module != modules_.end(), "a table of groups belongs to a quantised matrix");
      origins_.push_back(
          {.plain = std::nullopt, .module = static_cast<std::size_t>(module - modules_.begin())});
    } else {
      origins_.push_back({.plain = plain.size()});
      plain.push_back(tensor);
    }
  }
  plain_ = std::make_unique<CheckpointSource>(checkpoint_, model, std::move(plain),
                                              std::move(others), dtype_, what_);
}

PackedCheckpointSource::Stored PackedCheckpointSource::find(
    const std::string& name, const std::vector<std::vector<std::int64_t>>& shapes,
    std::span<const std::string_view> types) const {
  const TensorPlace* place = checkpoint_->find(name);
  if (place == nullptr) {
    fail("{}: tensor {} is missing", what_, shown(name));
  }
  check_listed(*place, what_);
  const StoredTensor& tensor = *place->tensor;
  if (std::ranges::find(shapes, tensor.shape) == shapes.end()) {
    fail("{}: tensor {} has shape {}, but config.json asks for {}", what_, shown(name),
         shape_text(tensor.shape), shape_text(shapes.front()));
  }
  if (std::ranges::find(types, tensor.dtype) == types.end()) {
    fail("{}: tensor {} is stored as {}, which is not supported there", what_, shown(name),
         tensor.dtype);
  }
  const std::int64_t cols = tensor.shape.size() == 2 ? tensor.shape.back() : 1;
  const std::int64_t rows = tensor.shape.empty() ? 1 : tensor.shape.front();
  return {.file = place->file,
          .begin = tensor.begin,
          .rows = rows,
          .cols = cols,
          .element = rows * cols == 0 ? 0 : tensor.bytes.n / (rows * cols),
          .dtype = dtype_from(tensor.dtype).value_or(DType::float32)};
}

PackedCheckpointSource::Module PackedCheckpointSource::open(const std::string& name,
                                                            std::int64_t outputs,
                                                            std::int64_t inputs) const {
  const std::int64_t bits = bits_of(format_.packed), each = 32 / bits;
  Module module{.name = name, .outputs = outputs, .inputs = inputs};
  const std::int64_t groups = format_.packed.groups(static_cast<std::int32_t>(inputs));
  const bool words = format_.stored == StoredCodes::gptq || format_.stored == StoredCodes::awq;
  if (words && (outputs % each != 0 || inputs % each != 0)) {
    fail("{}: {} has {} inputs and {} outputs, which fill no whole words of {} bits", what_,
         shown(name), inputs, outputs, bits);
  }
  std::vector<std::int64_t> shape{outputs, inputs};
  if (format_.stored == StoredCodes::gptq) {
    shape = {inputs / each, outputs};
  } else if (format_.stored == StoredCodes::awq) {
    shape = {inputs, outputs / each};
  } else if (format_.stored == StoredCodes::packed_integers) {
    shape = {outputs, ceil_div(inputs, each)};
  }
  const std::string codes = codes_name(format_.stored, name);
  if (format_.stored == StoredCodes::bytes) {
    const std::string_view type = format_.packed.codes == Codes::float8 ? kBytes[1] : kBytes[0];
    module.codes = find(codes, {shape}, {&type, 1});
  } else {
    module.codes = find(codes, {shape}, kWords);
  }
  module.scales = find_scales(module);
  const bool without_zeros = format_.stored == StoredCodes::awq && format_.packed.zero_points == 0 &&
                             checkpoint_->find(name + ".qzeros") == nullptr;
  if (words && !without_zeros) {
    module.zeros = find(name + ".qzeros", {{groups, outputs / each}}, kWords);
  } else if (format_.packed.zero_points != 0) {
    module.zeros = find(name + ".weight_zero_point", {{ceil_div(outputs, each), groups}}, kWords);
  }
  read_groups(module);
  return module;
}

PackedCheckpointSource::Stored PackedCheckpointSource::find_scales(const Module& module) const {
  const std::int64_t groups = format_.packed.groups(static_cast<std::int32_t>(module.inputs));
  const std::string name = scales_name(format_.stored, *checkpoint_, module.name);
  if (format_.stored == StoredCodes::gptq || format_.stored == StoredCodes::awq) {
    return find(name, {{groups, module.outputs}}, kScales);
  }
  if (format_.block_rows > 0) {
    return find(name, {{ceil_div(module.outputs, format_.block_rows), groups}}, kScales);
  }
  if (groups > 1 || format_.packed.group > 0) {
    return find(name, {{module.outputs, groups}}, kScales);
  }
  return find(name, {{module.outputs, 1}, {module.outputs}, {1, 1}, {1}, {}}, kScales);
}

// Which group each input is of. Without act-order a table has to say what is so without it.
void PackedCheckpointSource::read_groups(Module& module) const {
  const std::string name =
      module.name + (format_.stored == StoredCodes::gptq ? ".g_idx" : ".weight_g_idx");
  const bool needed = format_.packed.input_groups != 0;
  if (!needed && (format_.stored != StoredCodes::gptq || checkpoint_->find(name) == nullptr)) {
    return;
  }
  const std::int64_t groups = format_.packed.groups(static_cast<std::int32_t>(module.inputs));
  const Stored table = find(name, {{module.inputs}}, kWords);
  const std::vector<std::byte> words = rectangle(table, 0, module.inputs, 0, 1);
  for (std::int64_t k = 0; k < module.inputs; ++k) {
    const auto group = static_cast<std::int32_t>(word_at(words, k));
    if (group < 0 || group >= groups) {
      fail("{}: tensor {} names group {} for input {}: there are {}", what_, shown(name), group, k,
           groups);
    }
    const std::int64_t neighbours = format_.packed.group == 0 ? 0 : k / format_.packed.group;
    if (!needed && group != neighbours) {
      fail("{}: tensor {} has input {} in group {}, but \"desc_act\" is not true", what_,
           shown(name), k, group);
    }
    if (needed) {
      module.groups.push_back(static_cast<std::uint16_t>(group));
    }
  }
}

std::vector<std::byte> PackedCheckpointSource::rectangle(const Stored& from, std::int64_t row,
                                                         std::int64_t rows, std::int64_t col,
                                                         std::int64_t cols) const {
  std::vector<std::byte> out(static_cast<std::size_t>(rows * cols * from.element));
  const auto width = static_cast<std::size_t>(cols * from.element);
  const auto at = [&](std::int64_t r) {
    return from.begin + static_cast<std::uint64_t>((r * from.cols + col) * from.element);
  };
  if (cols == from.cols) {
    from.file->file().read_exactly(at(row), out);
    return out;
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    from.file->file().read_exactly(
        at(row + r), std::span(out).subspan(static_cast<std::size_t>(r) * width, width));
  }
  return out;
}

PackedCheckpointSource::Rows PackedCheckpointSource::read(const Module& module, std::int64_t first,
                                                          std::int64_t count) const {
  Rows rows{.first = first / 8 * 8};  // whole words
  rows.count = std::min(round_up(first + count, 8), module.outputs) - rows.first;
  const std::int64_t groups = format_.packed.groups(static_cast<std::int32_t>(module.inputs));
  rows.codes.resize(static_cast<std::size_t>(rows.count * module.inputs));
  rows.scales.resize(static_cast<std::size_t>(rows.count * groups));
  rows.zeros.resize(rows.scales.size());
  read_codes(module, rows);
  read_scales(module, rows);
  read_zeros(module, rows);
  return rows;
}

void PackedCheckpointSource::read_codes(const Module& module, Rows& rows) const {
  const std::int64_t bits = bits_of(format_.packed), each = 32 / bits;
  const auto middle = static_cast<std::int32_t>(1 << (bits - 1));
  const std::uint32_t mask = bits == 4 ? 0xf : 0xff;
  const auto put = [&](std::int64_t row, std::int64_t input, std::uint32_t word, std::int64_t i) {
    rows.codes[static_cast<std::size_t>(row * module.inputs + input)] =
        static_cast<std::int8_t>(static_cast<std::int32_t>(word >> (bits * i) & mask) - middle);
  };
  switch (format_.stored) {
    case StoredCodes::bytes: {
      const auto bytes = rectangle(module.codes, rows.first, rows.count, 0, module.inputs);
      std::memcpy(rows.codes.data(), bytes.data(), bytes.size());
      return;
    }
    case StoredCodes::gptq: {
      const auto words = rectangle(module.codes, 0, module.codes.rows, rows.first, rows.count);
      for (std::int64_t k = 0; k < module.inputs; ++k) {
        for (std::int64_t row = 0; row < rows.count; ++row) {
          put(row, k, word_at(words, k / each * rows.count + row), k % each);
        }
      }
      return;
    }
    case StoredCodes::awq: {
      const std::int64_t width = rows.count / each;
      const auto words = rectangle(module.codes, 0, module.inputs, rows.first / each, width);
      for (std::int64_t k = 0; k < module.inputs; ++k) {
        for (std::int64_t w = 0; w < width; ++w) {
          for (std::int64_t i = 0; i < each; ++i) {
            put(w * each + kAwqOrder[static_cast<std::size_t>(i)], k, word_at(words, k * width + w),
                i);
          }
        }
      }
      return;
    }
    case StoredCodes::packed_integers: {
      const auto words = rectangle(module.codes, rows.first, rows.count, 0, module.codes.cols);
      for (std::int64_t row = 0; row < rows.count; ++row) {
        for (std::int64_t k = 0; k < module.inputs; ++k) {
          put(row, k, word_at(words, row * module.codes.cols + k / each), k % each);
        }
      }
      return;
    }
  }
}

void PackedCheckpointSource::read_scales(const Module& module, Rows& rows) const {
  const std::int64_t groups = std::ssize(rows.scales) / rows.count;
  const Stored& stored = module.scales;
  const bool by_group = format_.stored == StoredCodes::gptq || format_.stored == StoredCodes::awq;
  // The row of scales of an output, where rows are of outputs or of blocks of them. Only those needed are read:
  // a tensor is filled in many parts.
  const auto of_output = [&](std::int64_t row) {
    return stored.rows == 1 ? 0 : row / std::max(1, format_.block_rows);
  };
  const std::int64_t first = of_output(rows.first);
  const std::int64_t needed = of_output(rows.first + rows.count - 1) + 1 - first;
  const std::vector<std::byte> bytes = by_group
                                           ? rectangle(stored, 0, groups, rows.first, rows.count)
                                           : rectangle(stored, first, needed, 0, stored.cols);
  std::vector<float> values(bytes.size() / static_cast<std::size_t>(stored.element));
  convert(stored.dtype, bytes, DType::float32, std::as_writable_bytes(std::span(values)));
  for (std::int64_t row = 0; row < rows.count; ++row) {
    const std::int64_t of_block = of_output(rows.first + row) - first;
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int64_t at = by_group ? group * rows.count + row : of_block * stored.cols + group;
      rows.scales[static_cast<std::size_t>(row * groups + group)] =
          values[static_cast<std::size_t>(at)];
    }
  }
}

void PackedCheckpointSource::read_zeros(const Module& module, Rows& rows) const {
  if (module.zeros.file == nullptr) {
    return;
  }
  const std::int64_t groups = std::ssize(rows.zeros) / rows.count;
  const std::int64_t bits = bits_of(format_.packed), each = 32 / bits;
  const std::int32_t middle = 1 << (bits - 1);
  const std::uint32_t mask = bits == 4 ? 0xf : 0xff;
  const bool by_rows = format_.stored == StoredCodes::packed_integers;
  const std::int64_t word_rows = by_rows ? ceil_div(rows.count, each) : groups;
  const std::int64_t word_cols = by_rows ? groups : rows.count / each;
  const std::vector<std::byte> words =
      rectangle(module.zeros, by_rows ? rows.first / each : 0, word_rows,
                by_rows ? 0 : rows.first / each, word_cols);
  for (std::int64_t row = 0; row < rows.count; ++row) {
    std::int64_t place = row % each;
    if (format_.stored == StoredCodes::awq) {
      place = std::ranges::find(kAwqOrder, place) - kAwqOrder.begin();
    }
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int64_t at =
          by_rows ? row / each * word_cols + group : group * word_cols + row / each;
      const std::uint32_t stored = word_at(words, at) >> (bits * place) & mask;
      const auto zero = static_cast<std::int32_t>(
          (stored + static_cast<std::uint32_t>(format_.zero_offset)) & mask);
      if (format_.packed.zero_points == 0 && zero != middle) {
        fail("{}: {} has zero point {} for output {}, but {}", what_, shown(module.name), zero,
             rows.first + row,
             format_.stored == StoredCodes::awq ? "\"zero_point\" is false" : "\"sym\" is true");
      }
      rows.zeros[static_cast<std::size_t>(row * groups + group)] =
          static_cast<std::int8_t>(zero - middle);
    }
  }
}

void PackedCheckpointSource::fill(std::size_t tensor, std::int64_t first,
                                  std::span<std::byte> out) const {
  const Origin& origin = origins_[tensor];
  if (origin.plain) {
    plain_->fill(*origin.plain, first, out);
    return;
  }
  const WeightTensor& wanted = tensors_[tensor];
  const Module& module = modules_[origin.module];
  if (wanted.packed) {
    fill_panels(module, wanted.first_output + first * kPackedRows, out);
  } else if (is_groups(wanted.weight)) {
    for (std::size_t i = 0; i < out.size() / 2; ++i) {
      const auto at = static_cast<std::size_t>(first) + i;
      std::memcpy(out.data() + 2 * i, &module.groups[at % module.groups.size()], 2);
    }
  } else {
    fill_numbers(module, wanted, first, out);
  }
}

void PackedCheckpointSource::fill_panels(const Module& module, std::int64_t row,
                                         std::span<std::byte> out) const {
  const auto cols = static_cast<std::int32_t>(module.inputs);
  const PackedPanel map = packed_panel(packed_, cols);
  const auto size = static_cast<std::size_t>(map.bytes.n);
  const std::int64_t panels = static_cast<std::int64_t>(out.size() / size);
  const Rows rows = read(module, row, panels * kPackedRows);
  const std::int64_t groups = packed_.groups(cols);
  const std::int64_t scale_size = size_of(packed_.scale_dtype).n;
  std::ranges::fill(out, std::byte{0});
  for (std::int64_t r = 0; r < panels * kPackedRows; ++r) {
    std::byte* panel = out.data() + r / kPackedRows * map.bytes.n;
    const std::int64_t lane = r % kPackedRows, from = row - rows.first + r;
    const std::int8_t* codes = rows.codes.data() + from * cols;
    for (std::int64_t k = 0; k < cols; ++k) {
      if (packed_.codes == Codes::int4) {
        const auto code = static_cast<std::byte>(codes[k] + 8);
        panel[k / 2 * kPackedRows + lane] |= k % 2 == 0 ? code : code << 4;
      } else {
        panel[k * kPackedRows + lane] = static_cast<std::byte>(codes[k]);
      }
    }
    for (std::int64_t group = 0; group < groups; ++group) {
      const auto at = static_cast<std::size_t>(from * groups + group);
      convert(DType::float32, std::as_bytes(std::span(&rows.scales[at], 1)), packed_.scale_dtype,
              {panel + map.scales + (group * kPackedRows + lane) * scale_size,
               static_cast<std::size_t>(scale_size)});
      if (packed_.zero_points != 0) {
        panel[map.zeros + group * kPackedRows + lane] = static_cast<std::byte>(rows.zeros[at]);
      }
    }
  }
}

void PackedCheckpointSource::fill_numbers(const Module& module, const WeightTensor& wanted,
                                          std::int64_t first, std::span<std::byte> out) const {
  const std::int64_t begin = wanted.first_output * module.inputs + first;
  const std::int64_t count = static_cast<std::int64_t>(out.size()) / size_of(dtype_).n;
  const std::int64_t row = begin / module.inputs;
  const Rows rows = read(module, row, ceil_div(begin + count, module.inputs) - row);
  const std::int64_t groups = std::ssize(rows.scales) / rows.count;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t r = (begin + i) / module.inputs - rows.first;
    const std::int64_t k = (begin + i) % module.inputs;
    const std::int64_t group = !module.groups.empty() ? module.groups[static_cast<std::size_t>(k)]
                               : format_.packed.group == 0 ? 0
                                                           : k / format_.packed.group;
    const std::int8_t code = rows.codes[static_cast<std::size_t>(r * module.inputs + k)];
    const auto at = static_cast<std::size_t>(r * groups + group);
    const float number = format_.packed.codes == Codes::float8
                             ? float8_to_float(static_cast<std::uint8_t>(code))
                             : static_cast<float>(code - rows.zeros[at]);
    values[static_cast<std::size_t>(i)] = rows.scales[at] * number;
  }
  convert(DType::float32, std::as_bytes(std::span<const float>(values)), dtype_, out);
}

void PackedCheckpointSource::check_after(std::span<const std::byte> segment) const {
  plain_->check_after(segment);
}

}  // namespace poise
