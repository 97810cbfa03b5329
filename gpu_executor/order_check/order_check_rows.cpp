// The rows of a mini-batch (gpu_executor/order_check/order_check_batch.h), and its checks in their order.

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/families/rotary.h"
#include "common/windows/unseen_blocks.h"
#include "gpu_executor/order_check/order_check_batch.h"
#include "kernels/kernels.h"

namespace poise {

void CheckedBatch::check_place(const char* what, std::uint32_t i, messages::Kind kind,
                               messages::Place place) const {
  if (kind != messages::Kind::Kv && kind != messages::Kind::Act) {
    refuse("{} {} is of block kind {}, which is none", what, i, static_cast<int>(kind));
  }
  if (place != messages::Place::Host && place != messages::Place::Gpu) {
    refuse("{} {} is of place {}, which is none", what, i, static_cast<int>(place));
  }
}

std::uint32_t CheckedBatch::entries_there() const {
  return entries() == 0 ? 0
                        : static_cast<std::uint32_t>(std::ranges::count_if(
                              *tables.entries(), [](const messages::AttentionEntry* entry) {
                                return entry->place() != messages::Place::Dropped;
                              }));
}

void CheckedBatch::check_dropped(std::uint32_t sequence, std::uint32_t block) const {
  const std::uint32_t context = tables.sequences()->Get(sequence)->context();
  const std::int32_t unseen = unseen_blocks(context, window_of_all(shape));
  if (block >= static_cast<std::uint32_t>(unseen)) {
    refuse(
        "sequence {}, block {} is dropped, but its rows see it: from token {} on, {} blocks are "
        "not seen",
        sequence, block, context, unseen);
  }
}

std::uint32_t CheckedBatch::pool_blocks(messages::Kind kind, messages::Place place) const {
  if (place == messages::Place::Gpu) {
    return static_cast<std::uint32_t>(kind == messages::Kind::Kv ? limits.gpu_kv_blocks
                                                                 : limits.gpu_act_blocks);
  }
  return pool.blocks(kind == messages::Kind::Kv ? BlockKind::kv : BlockKind::act);
}

void RowCheck::check_rows() {
  check_sizes();
  check_tokens();
  check_sequences();
}

void RowCheck::check_results() const {
  check_stores();
  check_samples();
}

void RowCheck::check_sizes() const {
  if (batch_.rows() == 0 ||
      batch_.rows() > static_cast<std::uint32_t>(batch_.limits.max_mini_batch_rows)) {
    batch_.refuse("{} rows, not 1 to {}", batch_.rows(), batch_.limits.max_mini_batch_rows);
  }
  const std::uint32_t sequences = size_of_vector(batch_.tables.sequences());
  if (sequences == 0 || sequences > static_cast<std::uint32_t>(batch_.limits.max_sequences)) {
    batch_.refuse("{} sequences, not 1 to {}", sequences, batch_.limits.max_sequences);
  }
  const std::uint32_t prompts = size_of_vector(batch_.tables.prompt_tokens());
  if (prompts != sequences && (prompts > 0 || depends_on_prompt(batch_.shape))) {
    batch_.refuse("{} sequences, but the prompt's tokens of {}", sequences, prompts);
  }
  // Each entry has a slot, or a block of the pool if host cores attend it.
  const std::int64_t most = batch_.entries() > 0 && is_on_host(batch_.tables)
                                ? batch_.pool_blocks(messages::Kind::Kv, messages::Place::Host)
                                : batch_.limits.max_entries();
  if (const std::uint32_t there = batch_.entries_there(); there == 0 || there > most) {
    batch_.refuse("{} attention entries, not 1 to {}", there, most);
  }
}

void RowCheck::check_tokens() const {
  for (std::uint32_t row = 0; row < batch_.rows(); ++row) {
    const std::int32_t token = batch_.tables.tokens()->Get(row);
    if (token < 0 || token >= batch_.shape.vocab_size) {
      batch_.refuse("row {} is token {} of a vocabulary of {}", row, token,
                    batch_.shape.vocab_size);
    }
  }
}

void RowCheck::check_sequences() {
  std::uint64_t row = 0;
  const std::uint64_t longest = static_cast<std::uint64_t>(
      std::min(batch_.limits.max_context, batch_.shape.max_position_embeddings));
  for (std::uint32_t i = 0; i < batch_.tables.sequences()->size(); ++i) {
    const messages::Sequence& sequence = *batch_.tables.sequences()->Get(i);
    const std::uint64_t end = std::uint64_t{sequence.context()} + sequence.new_tokens();
    if (sequence.new_tokens() == 0 || end > longest) {
      batch_.refuse(
          "sequence {} has {} tokens of context and {} new ones; at least 1 is new and all "
          "are at most {}",
          i, sequence.context(), sequence.new_tokens(), longest);
    }
    if (sequence.first_row() != row || row + sequence.new_tokens() > batch_.rows()) {
      batch_.refuse("sequence {} starts at row {} with {} rows, the next row is {} of {}", i,
                    sequence.first_row(), sequence.new_tokens(), row, batch_.rows());
    }
    if (sequence.first_entry() + blocks_of(sequence) > batch_.entries()) {
      batch_.refuse("sequence {} has entries {} to {} of {}", i, sequence.first_entry(),
                    sequence.first_entry() + blocks_of(sequence), batch_.entries());
    }
    row += sequence.new_tokens();
    sequence_of_row_.insert(sequence_of_row_.end(), sequence.new_tokens(), i);
  }
  if (row != batch_.rows()) {
    batch_.refuse("its sequences have {} rows of {}", row, batch_.rows());
  }
}

void RowCheck::check_stores() const {
  for (std::uint32_t i = 0; i < size_of_vector(batch_.tables.stores()); ++i) {
    const messages::Store& store = *batch_.tables.stores()->Get(i);
    batch_.check_place("store", i, store.kind(), store.place());
    if (store.count() == 0 || std::uint64_t{store.token()} + store.count() > kBlockTokens) {
      batch_.refuse("store {} is of {} rows from token {} of a block of {}", i, store.count(),
                    store.token(), kBlockTokens);
    }
    if (std::uint64_t{store.row()} + store.count() > batch_.rows()) {
      batch_.refuse("store {} is of {} rows from {}, there are {}", i, store.count(), store.row(),
                    batch_.rows());
    }
    const std::uint32_t blocks = batch_.pool_blocks(store.kind(), store.place());
    if (store.block() >= blocks) {
      batch_.refuse("store {} goes to {} block {}, the {} pool has {}", i,
                    messages::EnumNameKind(store.kind()), store.block(),
                    messages::EnumNamePlace(store.place()), blocks);
    }
    check_store_target(i, store);
  }
  check_stored_in_place();
}

void RowCheck::check_stored_in_place() const {
  std::vector<bool> stored(batch_.rows());
  for (std::uint32_t i = 0; i < size_of_vector(batch_.tables.stores()); ++i) {
    const messages::Store& store = *batch_.tables.stores()->Get(i);
    if (store.kind() == messages::Kind::Kv) {
      std::fill_n(stored.begin() + store.row(), store.count(), true);
    }
  }
  for (std::uint32_t row = 0; row < batch_.rows(); ++row) {
    const messages::Sequence& sequence = *batch_.tables.sequences()->Get(sequence_of_row_[row]);
    const std::uint32_t position = sequence.context() + row - sequence.first_row();
    const messages::AttentionEntry& entry =
        *batch_.tables.entries()->Get(sequence.first_entry() + position / kBlockTokens);
    const bool in_place =
        entry.place() == messages::Place::Gpu || entry.where() == messages::Where::HostInPlace;
    if (entry.kind() == messages::Kind::Kv && in_place && !stored[row]) {
      batch_.refuse("row {} goes to Kv block {} of the {}, which nothing stores", row,
                    entry.block(), entry.place() == messages::Place::Gpu ? "device" : "host");
    }
  }
}

void RowCheck::check_store_target(std::uint32_t i, const messages::Store& store) const {
  const std::uint32_t index = sequence_of_row_[store.row()];
  if (sequence_of_row_[store.row() + store.count() - 1] != index) {
    batch_.refuse("store {} is of rows of two sequences", i);
  }
  const messages::Sequence& sequence = *batch_.tables.sequences()->Get(index);
  const std::uint32_t position = sequence.context() + store.row() - sequence.first_row();
  if (position % kBlockTokens != store.token()) {
    batch_.refuse("store {} puts position {} at token {} of its block", i, position, store.token());
  }
  const messages::AttentionEntry& entry =
      *batch_.tables.entries()->Get(sequence.first_entry() + position / kBlockTokens);
  const bool same_pool = entry.kind() == store.kind() && entry.place() == store.place();
  if (same_pool && entry.block() != store.block()) {
    batch_.refuse("store {} goes to {} block {}, its sequence has block {} there", i,
                  messages::EnumNameKind(store.kind()), store.block(), entry.block());
  }
  if (!same_pool && store.kind() == messages::Kind::Kv && store.place() == messages::Place::Gpu) {
    batch_.refuse("store {} goes to Kv block {} of the device, which its sequence does not read", i,
                  store.block());
  }
  if (!same_pool && is_on_host(batch_.tables)) {
    batch_.refuse("store {} goes to {} block {}, but host cores write Kv blocks of their own alone",
                  i, messages::EnumNameKind(store.kind()), store.block());
  }
}

void RowCheck::check_samples() const {
  std::vector<bool> sampled(batch_.tables.sequences()->size());
  for (std::uint32_t i = 0; i < size_of_vector(batch_.tables.samples()); ++i) {
    const messages::Sample& sample = *batch_.tables.samples()->Get(i);
    if (sample.sequence() >= sampled.size() || sampled[sample.sequence()]) {
      batch_.refuse("sample {} is of sequence {} {}", i, sample.sequence(),
                    sample.sequence() >= sampled.size() ? "that does not exist" : "again");
    }
    sampled[sample.sequence()] = true;
    if (!std::isfinite(sample.temperature()) || sample.temperature() < 0 ||
        !(sample.top_p() > 0 && sample.top_p() <= 1) || sample.top_k() < 0) {
      batch_.refuse("sample {} has temperature {}, top_p {}, top_k {}", i, sample.temperature(),
                    sample.top_p(), sample.top_k());
    }
    if (sample.logprobs() < -1 || sample.logprobs() > kMaxLogprobs) {
      batch_.refuse("sample {} wants {} logprobs, not -1 to {}", i, sample.logprobs(),
                    kMaxLogprobs);
    }
    if (sample.prompt_top() < -1 || sample.prompt_top() > kMaxLogprobs) {
      batch_.refuse("sample {} wants {} logprobs of its prompt, not -1 to {}", i,
                    sample.prompt_top(), kMaxLogprobs);
    }
    if (!(sample.min_p() >= 0 && sample.min_p() <= 1)) {
      batch_.refuse("sample {} has min_p {}", i, sample.min_p());
    }
    check_targets(i, sample);
    check_edits(i, sample);
  }
}

void RowCheck::check_edits(std::uint32_t i, const messages::Sample& sample) const {
  const std::uint32_t edits = size_of_vector(sample.edits());
  const std::uint32_t mask = size_of_vector(sample.mask());
  if (edits == 0 && mask == 0 && !sample.only_edited()) {
    return;
  }
  const std::int64_t room = mask > 0 ? mask_edits(batch_.shape.vocab_size) : 0;
  if (edits + room > batch_.limits.logit_edits) {
    batch_.refuse("sample {} has {} edits of logits; logit_edits allows {}", i, edits + room,
                  batch_.limits.logit_edits);
  }
  check_mask(i, sample);
  if (!sample.generate()) {
    batch_.refuse("sample {} has edits of logits and generates nothing", i);
  }
  if (sample.prompt_logprobs() &&
      sample.prompt_targets()->Get(sample.prompt_targets()->size() - 1) >= 0) {
    batch_.refuse("sample {} edits the logits of a row that has a prompt target", i);
  }
  std::int32_t least = 0;
  for (std::uint32_t e = 0; e < edits; ++e) {
    const messages::LogitEdit& edit = *sample.edits()->Get(e);
    if (edit.token() < least || edit.token() >= batch_.shape.vocab_size) {
      batch_.refuse("edit {} of sample {} is of token {}: edits are in the order of tokens, of {}",
                    e, i, edit.token(), batch_.shape.vocab_size);
    }
    least = edit.token() + 1;
    const bool bars = edit.bias() == -std::numeric_limits<float>::infinity();
    if (!(bars || std::isfinite(edit.bias())) ||
        !(std::isfinite(edit.factor()) && edit.factor() > 0) || !std::isfinite(edit.minus())) {
      batch_.refuse("edit {} of sample {} has bias {}, factor {}, minus {}", e, i, edit.bias(),
                    edit.factor(), edit.minus());
    }
  }
}

void RowCheck::check_mask(std::uint32_t i, const messages::Sample& sample) const {
  const std::int32_t vocabulary = batch_.shape.vocab_size;
  const std::uint32_t words = size_of_vector(sample.mask());
  if (words == 0) {
    return;
  }
  if (words != static_cast<std::uint32_t>(mask_words(vocabulary))) {
    batch_.refuse("sample {} has a mask of {} words; a vocabulary of {} has {}", i, words,
                  vocabulary, mask_words(vocabulary));
  }
  const std::int32_t last = vocabulary % 32;  // tokens of the last word; 0: all
  if (last > 0 && sample.mask()->Get(words - 1) >> last != 0) {
    batch_.refuse("sample {} has a mask that allows tokens beyond the vocabulary of {}", i,
                  vocabulary);
  }
}

void RowCheck::check_targets(std::uint32_t i, const messages::Sample& sample) const {
  const std::uint32_t targets = size_of_vector(sample.prompt_targets());
  const std::uint32_t wanted = sample.prompt_logprobs()
                                   ? batch_.tables.sequences()->Get(sample.sequence())->new_tokens()
                                   : 0;
  if (targets != wanted) {
    batch_.refuse("sample {} has {} prompt targets for {} rows", i, targets, wanted);
  }
  for (std::uint32_t row = 0; row < targets; ++row) {
    const std::int32_t token = sample.prompt_targets()->Get(row);
    if (token < -1 || token >= batch_.shape.vocab_size) {
      batch_.refuse("sample {} has prompt target {} of a vocabulary of {}", i, token,
                    batch_.shape.vocab_size);
    }
  }
}

void check_mini_batch(const messages::MiniBatch& batch, const ModelShape& shape,
                      const DeviceLimits& limits, const PoolPartition& pool) {
  const CheckedBatch checked{.tables = batch, .shape = shape, .limits = limits, .pool = pool};
  RowCheck rows(checked);
  rows.check_rows();
  if (is_on_host(batch)) {
    check_host_batch(checked);
  } else {
    SlotCheck(checked).run();
  }
  rows.check_results();
}

}  // namespace poise
