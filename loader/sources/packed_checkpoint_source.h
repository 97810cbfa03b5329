#pragma once
// Weights of a quantised checkpoint (common/families/checkpoint_format.h). Its matrices become panels of codes
// (common/formats/packed_weights.h) bit by bit, without any rounding: codes and zero points lose their offset,
// scales of a tensor or a block are repeated for each row. A matrix that the shape keeps plain, the head
// for example, becomes the numbers that its codes mean. Plain tensors come from a CheckpointSource.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/families/checkpoint_format.h"
#include "common/model_config.h"
#include "loader/checkpoint.h"
#include "loader/sources/checkpoint_source.h"
#include "loader/sources/weight_source.h"

namespace poise {

// What the tensors say of the format that the config cannot: which matrices of the layers are quantised in
// all layers, and the type of the scales. Fails where one is quantised in some layers only.
ModelShape shape_in_checkpoint(const ModelConfig& model, const CheckpointFormat& format,
                               const Checkpoint& checkpoint, const std::string& what);

class PackedCheckpointSource final : public WeightSource {
 public:
  // Fails if a tensor is missing, of another shape or type, or if a group's number is out of range.
  PackedCheckpointSource(std::shared_ptr<const Checkpoint> checkpoint, const ModelConfig& model,
                         const CheckpointFormat& format, const WeightLayout& layout, DType dtype,
                         std::string what);

  const std::vector<WeightTensor>& tensors() const override { return tensors_; }
  void fill(std::size_t tensor, std::int64_t first, std::span<std::byte> out) const override;
  void check_after(std::span<const std::byte> segment) const override;
  const CheckpointSource& plain() const { return *plain_; }

 private:
  // A part of a checkpoint's tensor as a rectangle of elements.
  struct Stored {
    const SafetensorsFile* file = nullptr;
    std::uint64_t begin = 0;  // byte of the file
    std::int64_t rows = 0, cols = 0;
    std::int64_t element = 0;      // bytes
    DType dtype = DType::float32;  // of scales
  };
  // One quantised matrix of the checkpoint.
  struct Module {
    std::string name;
    std::int64_t outputs = 0, inputs = 0;
    Stored codes, scales, zeros;
    std::vector<std::uint16_t> groups;  // of each input, where they are not of neighbours
  };
  // Some outputs of a module: codes and zero points without their offset.
  struct Rows {
    std::int64_t first = 0, count = 0;
    std::vector<std::int8_t> codes;  // (count, inputs); float8: the bytes
    std::vector<float> scales;       // (count, groups)
    std::vector<std::int8_t> zeros;  // (count, groups)
  };

  Module open(const std::string& name, std::int64_t outputs, std::int64_t inputs) const;
  Stored find(const std::string& name, const std::vector<std::vector<std::int64_t>>& shapes,
              std::span<const std::string_view> types) const;
  Stored find_scales(const Module& module) const;
  void read_groups(Module& module) const;
  std::vector<std::byte> rectangle(const Stored& from, std::int64_t row, std::int64_t rows,
                                   std::int64_t col, std::int64_t cols) const;
  Rows read(const Module& module, std::int64_t first, std::int64_t count) const;
  void read_codes(const Module& module, Rows& rows) const;
  void read_scales(const Module& module, Rows& rows) const;
  void read_zeros(const Module& module, Rows& rows) const;
  void fill_panels(const Module& module, std::int64_t row, std::span<std::byte> out) const;
  void fill_numbers(const Module& module, const WeightTensor& wanted, std::int64_t first,
                    std::span<std::byte> out) const;

  std::shared_ptr<const Checkpoint> checkpoint_;
  CheckpointFormat format_;
  PackedFormat packed_;  // of the segment
  DType dtype_;
  std::string what_;
  std::vector<WeightTensor> tensors_;
  // Of each tensor, one of the two: its number in the plain source, or its module.
  struct Origin {
    std::optional<std::size_t> plain;
    std::size_t module = 0;
  };
  std::vector<Origin> origins_;
  std::vector<Module> modules_;
  std::unique_ptr<CheckpointSource> plain_;
};

}  // namespace poise
