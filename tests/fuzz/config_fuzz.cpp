// config.json and generation_config.json. Input: the first, then, behind a NUL byte, the second. From an accepted
// directory every size follows without overflow: the layout of weights in each dtype, which has no hole and no overlap.

#include "common/blocks.h"
#include "common/model_config.h"
#include "common/weight_layout.h"
#include "tests/fuzz/fuzzing.h"

namespace poise::fuzzing {
namespace {

void check_slab(const Slab& slab) {
  std::uint64_t end = 0;
  for (const WeightEntry& entry : slab.entries) {
    expect(entry.rows > 0 && entry.cols > 0 && entry.bytes.n > 0 && entry.offset >= end &&
               entry.offset - end < 256 && entry.offset % 256 == 0 &&
               entry.piece <= entry.last_piece &&
               static_cast<std::size_t>(entry.last_piece) < slab.pieces.size(),
           "weights lie one behind the other");
    end = entry.offset + static_cast<std::uint64_t>(entry.bytes.n);
  }
  std::uint64_t covered = 0;
  for (const WeightPiece& piece : slab.pieces) {
    expect(piece.offset == covered && piece.bytes.n > 0, "pieces lie one behind the other");
    covered += static_cast<std::uint64_t>(piece.bytes.n);
  }
  expect(covered >= end && covered <= static_cast<std::uint64_t>(slab.bytes.n),
         "pieces cover all weights");
}

void check_config(const ModelConfig& model) {
  const ModelShape& shape = model.shape;
  expect(shape.is_sound(), "sizes are in their bounds and agree");
  expect(std::ranges::is_sorted(model.eos) &&
             std::ranges::all_of(model.eos,
                                 [&](TokenId id) { return id >= 0 && id < shape.vocab_size; }),
         "ids that end an answer are sorted and of the vocabulary");
  expect(!model.bos || (*model.bos >= 0 && *model.bos < shape.vocab_size),
         "BOS is of the vocabulary");
  for (const std::string& notice : model.notices) {
    expect_sentence(notice);
  }
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    const WeightLayout layout = weight_layout(shape, dtype);
    check_slab(layout.outer);
    check_slab(layout.layer);
    expect(layout.total() > layout.outer.bytes, "layers take room");
    const BlockSizes sizes = block_sizes(shape, dtype, KvFormat::plain);
    expect(sizes.block(BlockKind::act).n > 0 && sizes.block(BlockKind::kv).n > 0,
           "blocks take room");
  }
}

void run_config(Input input) {
  const std::uint8_t* data = input.data();
  const std::size_t size = input.size();
  static const Folder folder;
  const auto parts = parts_of({data, size}, 2);
  folder.write("config.json", parts[0]);
  if (parts.size() > 1) {
    folder.write("generation_config.json", parts[1]);
  } else {
    folder.remove("generation_config.json");
  }
  refusal([&] { check_config(read_model_config(folder.path())); });
}

}  // namespace

const Target kConfigTarget{"config", run_config};

}  // namespace poise::fuzzing
