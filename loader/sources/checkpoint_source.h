#pragma once
// Weights from a checkpoint. Before a byte of a tensor is read, every tensor the model needs has been
// found there, with the shape the config asks for and a readable type. Tensors are read with pread
// into the segment, turned where the checkpoint has inputs first, and converted if the stored type is not
// the kept one.

#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/model_config.h"
#include "loader/checkpoint.h"
#include "loader/sources/weight_source.h"

namespace poise {

// The dtype weights and blocks are kept in: what the user asked for, else what the config declares,
// else what the token embedding is stored in.
DType kept_dtype(std::optional<DType> asked, const ModelConfig& model, const Checkpoint* checkpoint,
                 const std::string& what);

class CheckpointSource final : public WeightSource {
 public:
  // Fails with the first tensor that is missing or wrong, and says how many more are. `what` is the
  // model directory, as messages name it.
  CheckpointSource(std::shared_ptr<const Checkpoint> checkpoint, const ModelConfig& model,
                   const WeightLayout& layout, DType dtype, std::string what);
  // Of these tensors alone, the token embedding first; `others` are names that another source reads.
  CheckpointSource(std::shared_ptr<const Checkpoint> checkpoint, const ModelConfig& model,
                   std::vector<WeightTensor> tensors, std::set<std::string> others, DType dtype,
                   std::string what);

  const std::vector<WeightTensor>& tensors() const override { return tensors_; }
  void fill(std::size_t tensor, std::int64_t first, std::span<std::byte> out) const override;
  // Fails if a file was changed meanwhile, or if a tied head in the checkpoint is not the embedding.
  void check_after(std::span<const std::byte> segment) const override;

  // Tensors that the model does not need, in a sentence; nothing if there are none.
  const std::optional<std::string>& unneeded() const { return unneeded_; }
  // Tensors stored in another type than kept, likewise.
  const std::optional<std::string>& converted() const { return converted_; }

 private:
  struct Stored {
    const SafetensorsFile* file;
    std::uint64_t begin;  // byte of the file
    DType dtype;
  };
  Stored stored(const TensorPlace& place) const;
  void match();
  void tell_of_the_rest();
  void read(const Stored& from, std::int64_t first, std::span<std::byte> out) const;
  void read_turned(std::size_t tensor, std::int64_t first, std::span<std::byte> out) const;
  void check_tied_head(std::span<const std::byte> segment) const;

  std::shared_ptr<const Checkpoint> checkpoint_;
  DType dtype_;
  std::string what_;
  std::vector<WeightTensor> tensors_;
  std::set<std::string> others_;
  std::vector<Stored> stored_;  // of each tensor
  std::optional<Stored> repeated_head_;
  std::optional<std::string> unneeded_, converted_;
};

}  // namespace poise
