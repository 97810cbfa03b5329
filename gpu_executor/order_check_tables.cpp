// BatchCheck's tables of rows: which there are, of whom, where they are stored and sampled.

#include <algorithm>
#include <cmath>

#include "gpu_executor/order_check_batch.h"
#include "kernels/kernels.h"

namespace poise {

void BatchCheck::run() {
  check_sizes();
  check_tokens();
  check_sequences();
  check_loads();
  check_regenerate();
  check_entries();
  check_stores();
  check_samples();
}

void BatchCheck::check_sizes() {
  rows_ = size_of_vector(batch_.tokens());
  if (rows_ == 0 || rows_ > static_cast<std::uint32_t>(limits_.max_mini_batch_rows)) {
    refuse("{} rows, not 1 to {}", rows_, limits_.max_mini_batch_rows);
  }
  const std::uint32_t sequences = size_of_vector(batch_.sequences());
  if (sequences == 0 || sequences > static_cast<std::uint32_t>(limits_.max_sequences)) {
    refuse("{} sequences, not 1 to {}", sequences, limits_.max_sequences);
  }
  entries_ = size_of_vector(batch_.entries());
  if (entries_ == 0 || entries_ > limits_.max_entries()) {
    refuse("{} attention entries, not 1 to {}", entries_, limits_.max_entries());
  }
}

void BatchCheck::check_tokens() const {
  for (std::uint32_t row = 0; row < rows_; ++row) {
    const std::int32_t token = batch_.tokens()->Get(row);
    if (token < 0 || token >= shape_.vocab_size) {
      refuse("row {} is token {} of a vocabulary of {}", row, token, shape_.vocab_size);
    }
  }
}

void BatchCheck::check_sequences() {
  std::uint64_t row = 0;
  const std::uint64_t longest =
      static_cast<std::uint64_t>(std::min(limits_.max_context, shape_.max_position_embeddings));
  for (std::uint32_t i = 0; i < batch_.sequences()->size(); ++i) {
    const messages::Sequence& sequence = *batch_.sequences()->Get(i);
    const std::uint64_t end = std::uint64_t{sequence.context()} + sequence.new_tokens();
    if (sequence.new_tokens() == 0 || end > longest) {
      refuse(
          "sequence {} has {} tokens of context and {} new ones; at least 1 is new and all "
          "are at most {}",
          i, sequence.context(), sequence.new_tokens(), longest);
    }
    if (sequence.first_row() != row || row + sequence.new_tokens() > rows_) {
      refuse("sequence {} starts at row {} with {} rows, the next row is {} of {}", i,
             sequence.first_row(), sequence.new_tokens(), row, rows_);
    }
    if (sequence.first_entry() + blocks_of(sequence) > entries_) {
      refuse("sequence {} has entries {} to {} of {}", i, sequence.first_entry(),
             sequence.first_entry() + blocks_of(sequence), entries_);
    }
    row += sequence.new_tokens();
    sequence_of_row_.insert(sequence_of_row_.end(), sequence.new_tokens(), i);
  }
  if (row != rows_) {
    refuse("its sequences have {} rows of {}", row, rows_);
  }
}

void BatchCheck::check_place(const char* what, std::uint32_t i, messages::Kind kind,
                             messages::Place place) const {
  if (kind != messages::Kind::Kv && kind != messages::Kind::Act) {
    refuse("{} {} is of block kind {}, which is none", what, i, static_cast<int>(kind));
  }
  if (place != messages::Place::Host && place != messages::Place::Gpu) {
    refuse("{} {} is of place {}, which is none", what, i, static_cast<int>(place));
  }
}

std::uint32_t BatchCheck::pool_blocks(messages::Kind kind, messages::Place place) const {
  if (place == messages::Place::Gpu) {
    return static_cast<std::uint32_t>(kind == messages::Kind::Kv ? limits_.gpu_kv_blocks
                                                                 : limits_.gpu_act_blocks);
  }
  return pool_.blocks(kind == messages::Kind::Kv ? BlockKind::kv : BlockKind::act);
}

void BatchCheck::check_stores() const {
  for (std::uint32_t i = 0; i < size_of_vector(batch_.stores()); ++i) {
    const messages::Store& store = *batch_.stores()->Get(i);
    check_place("store", i, store.kind(), store.place());
    if (store.count() == 0 || std::uint64_t{store.token()} + store.count() > kBlockTokens) {
      refuse("store {} is of {} rows from token {} of a block of {}", i, store.count(),
             store.token(), kBlockTokens);
    }
    if (std::uint64_t{store.row()} + store.count() > rows_) {
      refuse("store {} is of {} rows from {}, there are {}", i, store.count(), store.row(), rows_);
    }
    const std::uint32_t blocks = pool_blocks(store.kind(), store.place());
    if (store.block() >= blocks) {
      refuse("store {} goes to {} block {}, the {} pool has {}", i,
             messages::EnumNameKind(store.kind()), store.block(),
             messages::EnumNamePlace(store.place()), blocks);
    }
    check_store_target(i, store);
  }
  check_stored_on_device();
}

void BatchCheck::check_stored_on_device() const {
  std::vector<bool> stored(rows_);
  for (std::uint32_t i = 0; i < size_of_vector(batch_.stores()); ++i) {
    const messages::Store& store = *batch_.stores()->Get(i);
    if (store.kind() == messages::Kind::Kv && store.place() == messages::Place::Gpu) {
      std::fill_n(stored.begin() + store.row(), store.count(), true);
    }
  }
  for (std::uint32_t row = 0; row < rows_; ++row) {
    const messages::Sequence& sequence = *batch_.sequences()->Get(sequence_of_row_[row]);
    const std::uint32_t position = sequence.context() + row - sequence.first_row();
    const messages::AttentionEntry& entry =
        *batch_.entries()->Get(sequence.first_entry() + position / kBlockTokens);
    if (entry.kind() == messages::Kind::Kv && entry.place() == messages::Place::Gpu &&
        !stored[row]) {
      refuse("row {} goes to Kv block {} of the device, which nothing stores", row, entry.block());
    }
  }
}

void BatchCheck::check_store_target(std::uint32_t i, const messages::Store& store) const {
  const std::uint32_t index = sequence_of_row_[store.row()];
  if (sequence_of_row_[store.row() + store.count() - 1] != index) {
    refuse("store {} is of rows of two sequences", i);
  }
  const messages::Sequence& sequence = *batch_.sequences()->Get(index);
  const std::uint32_t position = sequence.context() + store.row() - sequence.first_row();
  if (position % kBlockTokens != store.token()) {
    refuse("store {} puts position {} at token {} of its block", i, position, store.token());
  }
  const messages::AttentionEntry& entry =
      *batch_.entries()->Get(sequence.first_entry() + position / kBlockTokens);
  const bool same_pool = entry.kind() == store.kind() && entry.place() == store.place();
  if (same_pool && entry.block() != store.block()) {
    refuse("store {} goes to {} block {}, its sequence has block {} there", i,
           messages::EnumNameKind(store.kind()), store.block(), entry.block());
  }
  if (!same_pool && store.kind() == messages::Kind::Kv && store.place() == messages::Place::Gpu) {
    refuse("store {} goes to Kv block {} of the device, which its sequence does not read", i,
           store.block());
  }
}

void BatchCheck::check_samples() const {
  std::vector<bool> sampled(batch_.sequences()->size());
  for (std::uint32_t i = 0; i < size_of_vector(batch_.samples()); ++i) {
    const messages::Sample& sample = *batch_.samples()->Get(i);
    if (sample.sequence() >= sampled.size() || sampled[sample.sequence()]) {
      refuse("sample {} is of sequence {} {}", i, sample.sequence(),
             sample.sequence() >= sampled.size() ? "that does not exist" : "again");
    }
    sampled[sample.sequence()] = true;
    if (!std::isfinite(sample.temperature()) || sample.temperature() < 0 ||
        !(sample.top_p() > 0 && sample.top_p() <= 1) || sample.top_k() < 0) {
      refuse("sample {} has temperature {}, top_p {}, top_k {}", i, sample.temperature(),
             sample.top_p(), sample.top_k());
    }
    if (sample.logprobs() < -1 || sample.logprobs() > kMaxLogprobs) {
      refuse("sample {} wants {} logprobs, not -1 to {}", i, sample.logprobs(), kMaxLogprobs);
    }
    check_targets(i, sample);
  }
}

void BatchCheck::check_targets(std::uint32_t i, const messages::Sample& sample) const {
  const std::uint32_t targets = size_of_vector(sample.prompt_targets());
  const std::uint32_t wanted =
      sample.prompt_logprobs() ? batch_.sequences()->Get(sample.sequence())->new_tokens() : 0;
  if (targets != wanted) {
    refuse("sample {} has {} prompt targets for {} rows", i, targets, wanted);
  }
  for (std::uint32_t row = 0; row < targets; ++row) {
    const std::int32_t token = sample.prompt_targets()->Get(row);
    if (token < -1 || token >= shape_.vocab_size) {
      refuse("sample {} has prompt target {} of a vocabulary of {}", i, token, shape_.vocab_size);
    }
  }
}

void check_mini_batch(const messages::MiniBatch& batch, const ModelShape& shape,
                      const DeviceLimits& limits, const PoolPartition& pool) {
  BatchCheck(batch, shape, limits, pool).run();
}

}  // namespace poise
