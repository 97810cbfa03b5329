#include "loader/sources/checkpoint_source.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "common/trouble.h"
#include "common/words.h"
#include "loader/conversion.h"
#include "loader/tensor_list.h"

namespace poise {
namespace {

constexpr std::int64_t kPartBytes = 1 << 20;  // of the kept type, converted or compared at a time
constexpr std::size_t kNamesTold = 4;

std::string and_more(std::size_t others) {
  return others == 0 ? "" : fmt::format(" (and {})", counted(others, "more tensor"));
}

}  // namespace

DType kept_dtype(std::optional<DType> asked, const ModelConfig& model, const Checkpoint* checkpoint,
                 const std::string& what) {
  if (asked || model.declared) {
    return asked ? *asked : *model.declared;
  }
  if (checkpoint == nullptr) {
    return DType::float16;
  }
  const Family& family = *model.family;
  const std::string name =
      fmt::format("{}{}", tensor_prefix(family, *checkpoint, what), embedding_name(family));
  const std::string& stored = checkpoint->find(name)->tensor->dtype;
  const auto dtype = dtype_from(stored);
  if (!dtype) {
    fail("{}: tensor {} is stored as {}; float32 (F32), float16 (F16) and bfloat16 (BF16) are read",
         what, name, stored);
  }
  return *dtype;
}

CheckpointSource::CheckpointSource(std::shared_ptr<const Checkpoint> checkpoint,
                                   const ModelConfig& model, const WeightLayout& layout,
                                   DType dtype, std::string what)
    : CheckpointSource(
          checkpoint, model,
          tensor_list(*model.family, layout, tensor_prefix(*model.family, *checkpoint, what)), {},
          dtype, what) {}

CheckpointSource::CheckpointSource(std::shared_ptr<const Checkpoint> checkpoint,
                                   const ModelConfig& model, std::vector<WeightTensor> tensors,
                                   std::set<std::string> others, DType dtype, std::string what)
    : checkpoint_(std::move(checkpoint)),
      dtype_(dtype),
      what_(std::move(what)),
      tensors_(std::move(tensors)),
      others_(std::move(others)) {
  match();
  const TensorPlace* head = checkpoint_->find(kHeadName);
  if (model.shape.tie_word_embeddings != 0 && head != nullptr) {
    if (head->tensor->shape != tensors_.front().shape) {
      fail(
          "{}: tensor {} has shape {}, {} was expected: \"tie_word_embeddings\" makes it the token "
          "embedding",
          what_, kHeadName, shape_text(head->tensor->shape), shape_text(tensors_.front().shape));
    }
    repeated_head_ = stored(*head);
  }
  tell_of_the_rest();
}

CheckpointSource::Stored CheckpointSource::stored(const TensorPlace& place) const {
  const auto dtype = dtype_from(place.tensor->dtype);
  if (!dtype) {
    fail("{}: tensor {} is stored as {}; float32 (F32), float16 (F16) and bfloat16 (BF16) are read",
         what_, shown(place.tensor->name), place.tensor->dtype);
  }
  check_listed(place, what_);
  return {.file = place.file, .begin = place.tensor->begin, .dtype = *dtype};
}

void CheckpointSource::match() {
  std::vector<std::string> missing;
  std::vector<std::string> misshapen;
  for (const WeightTensor& tensor : tensors_) {
    const TensorPlace* place = checkpoint_->find(tensor.name);
    if (place == nullptr) {
      missing.push_back(tensor.name);
    } else if (place->tensor->shape != tensor.shape) {
      misshapen.push_back(fmt::format("tensor {} has shape {}, but config.json asks for {}",
                                      tensor.name, shape_text(place->tensor->shape),
                                      shape_text(tensor.shape)));
    } else {
      stored_.push_back(stored(*place));
    }
  }
  if (!misshapen.empty()) {
    fail("{}: {}{}", what_, misshapen.front(), and_more(misshapen.size() - 1));
  }
  if (!missing.empty()) {
    fail("{}: tensor {} is missing{}", what_, missing.front(), and_more(missing.size() - 1));
  }
}

void CheckpointSource::tell_of_the_rest() {
  std::set<std::string_view> needed(others_.begin(), others_.end());
  for (const WeightTensor& tensor : tensors_) {
    needed.insert(tensor.name);
  }
  if (repeated_head_) {
    needed.insert(kHeadName);
  }
  std::size_t unneeded = 0;
  std::string names;
  for (const auto& [name, place] : checkpoint_->tensors()) {
    if (!needed.contains(name) && name.ends_with(".sinks")) {
      fail("{}: tensor {}: attention sinks are not supported", what_, shown(name));
    }
    if (needed.contains(name) || unneeded++ >= kNamesTold) {
      continue;
    }
    names += (names.empty() ? "" : ", ") + shown(name);
  }
  if (unneeded > 0) {
    unneeded_ =
        fmt::format("{} {} not needed and not loaded: {}{}", counted(unneeded, "tensor"),
                    unneeded == 1 ? "is" : "are", names, unneeded > kNamesTold ? ", …" : "");
  }
  const auto other = std::ranges::count_if(
      stored_, [this](const Stored& tensor) { return tensor.dtype != dtype_; });
  if (other > 0) {
    converted_ =
        fmt::format("{} of {} {} stored in another type and converted to {}", other,
                    counted(stored_.size(), "tensor"), other == 1 ? "is" : "are", name_of(dtype_));
  }
}

void CheckpointSource::read(const Stored& from, std::int64_t first,
                            std::span<std::byte> out) const {
  const auto stored_size = static_cast<std::uint64_t>(size_of(from.dtype).n);
  const std::uint64_t offset = from.begin + static_cast<std::uint64_t>(first) * stored_size;
  if (from.dtype == dtype_) {
    from.file->file().read_exactly(offset, out);
    return;
  }
  thread_local std::vector<std::byte> buffer;
  buffer.resize(out.size() / static_cast<std::size_t>(size_of(dtype_).n) * stored_size);
  from.file->file().read_exactly(offset, buffer);
  convert(from.dtype, buffer, dtype_, out);
}

void CheckpointSource::fill(std::size_t tensor, std::int64_t first,
                            std::span<std::byte> out) const {
  const WeightTensor& wanted = tensors_[tensor];
  if (wanted.inputs_first) {
    read_turned(tensor, first, out);
  } else {
    const std::int64_t inputs = wanted.shape.size() > 1 ? wanted.shape.back() : 1;
    read(stored_[tensor], wanted.first_output * inputs + first, out);
  }
}

// Rows of (out, in) from a tensor of (in, out): its rows are read one after the other, the wanted outputs
// of each. A task is a few hundred outputs, so a read is some hundred bytes; the file's pages are cached.
void CheckpointSource::read_turned(std::size_t tensor, std::int64_t first,
                                   std::span<std::byte> out) const {
  const WeightTensor& wanted = tensors_[tensor];
  const std::int64_t inputs = wanted.shape.front(), outputs = wanted.shape.back();
  const auto element = static_cast<std::size_t>(size_of(dtype_).n);
  const std::int64_t end = first + static_cast<std::int64_t>(out.size() / element);
  const std::int64_t from = first / inputs, to = ceil_div(end, inputs);
  std::vector<std::byte> row(static_cast<std::size_t>(to - from) * element);
  for (std::int64_t input = 0; input < inputs; ++input) {
    read(stored_[tensor], input * outputs + wanted.first_output + from, row);
    for (std::int64_t output = from; output < to; ++output) {
      const std::int64_t at = output * inputs + input;
      if (at >= first && at < end) {
        std::memcpy(out.data() + static_cast<std::size_t>(at - first) * element,
                    row.data() + static_cast<std::size_t>(output - from) * element, element);
      }
    }
  }
}

void CheckpointSource::check_after(std::span<const std::byte> segment) const {
  checkpoint_->check_unchanged();
  if (repeated_head_) {
    check_tied_head(segment);
  }
}

void CheckpointSource::check_tied_head(std::span<const std::byte> segment) const {
  const WeightTensor& embedding = tensors_.front();
  const std::int64_t element = size_of(dtype_).n;
  std::vector<std::byte> part;
  for (std::int64_t first = 0; first < embedding.elements; first += kPartBytes / element) {
    const std::int64_t count = std::min(kPartBytes / element, embedding.elements - first);
    part.resize(static_cast<std::size_t>(count * element));
    read(*repeated_head_, first, part);
    const std::size_t at = embedding.offset + static_cast<std::size_t>(first * element);
    if (std::memcmp(part.data(), segment.data() + at, part.size()) != 0) {
      fail(
          "{}: {} differs from {}, though \"tie_word_embeddings\" says that they are one: set it "
          "to "
          "false in config.json to use both, or leave {} out of the checkpoint",
          what_, kHeadName, embedding.name, kHeadName);
    }
  }
}

}  // namespace poise
