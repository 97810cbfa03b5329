#include "gpu_executor/work.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "common/families/rotary.h"
#include "common/trouble.h"
#include "common/windows/unseen_blocks.h"

namespace poise {
namespace {

static_assert(sizeof(RowMove) == kRowMoveBytes && sizeof(ContextBlock) == kContextBlockBytes);
static_assert(sizeof(RotaryPlace) == kRotaryPlaceBytes);
static_assert(sizeof(AttentionSequence) == kAttentionSequenceBytes);
static_assert(sizeof(LogitEdit) == kLogitEditBytes);
constexpr std::int64_t kEditWords =
    kLogitEditBytes / sizeof(std::uint32_t);  // of a mask, in the room of an edit
static_assert(sizeof(SampleRow) == kSampleRowBytes && sizeof(SampledRow) == kSampledRowBytes);

constexpr std::int64_t kSpanAlignment = 256;
constexpr std::int64_t kArrayAlignment = 16;

// Packs arrays one behind the other into spans.
class TableWriter {
 public:
  void begin_span() {
    bytes_.resize(static_cast<std::size_t>(round_up(end(), kSpanAlignment)));
    span_ = end();
  }

  // Returns the array's place within the span.
  template <typename Record>
  std::int64_t add(const std::vector<Record>& records) {
    const std::int64_t at = round_up(end(), kArrayAlignment);
    const std::size_t size = records.size() * sizeof(Record);
    bytes_.resize(static_cast<std::size_t>(at) + size);
    if (size > 0) {
      std::memcpy(bytes_.data() + at, records.data(), size);
    }
    return at - span_;
  }

  TableSpan end_span() const { return {.offset = span_, .bytes = {end() - span_}}; }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::int64_t end() const { return static_cast<std::int64_t>(bytes_.size()); }

  std::vector<std::byte> bytes_;
  std::int64_t span_ = 0;
};

std::int32_t to_int(std::uint32_t n) { return static_cast<std::int32_t>(n); }

// Where the row at `position` of a mini-batch's sequence stands.
RotaryPlace place_of(const ModelShape& shape, const messages::MiniBatch& batch,
                     std::uint32_t sequence, std::uint32_t position) {
  const std::uint32_t prompt = depends_on_prompt(shape) ? batch.prompt_tokens()->Get(sequence) : 0;
  return {.position = to_int(position),
          .frequencies = frequency_set(shape, to_int(position), to_int(prompt))};
}

// Of the rows of the slots that KV Gen fills: first slot, first row, and so on.
std::vector<RotaryPlace> act_places(const messages::MiniBatch& batch, const ModelShape& shape) {
  std::vector<RotaryPlace> places;
  if (!shape.turns_heads() || batch.regenerate() == nullptr) {
    return places;
  }
  std::uint32_t slots = 0;
  for (const messages::SlotRange* range : *batch.regenerate()) {
    slots = std::max(slots, range->first_slot() + range->count());
  }
  places.resize(static_cast<std::size_t>(slots) * kBlockTokens);
  for (std::uint32_t number = 0; number < batch.sequences()->size(); ++number) {
    const messages::Sequence& sequence = *batch.sequences()->Get(number);
    for (std::uint32_t block = 0; block * kBlockTokens < sequence.context(); ++block) {
      const messages::AttentionEntry& entry = *batch.entries()->Get(sequence.first_entry() + block);
      if (entry.where() != messages::Where::RegeneratedKv || entry.slot() >= slots) {
        continue;
      }
      for (std::uint32_t row = 0; row < std::uint32_t{kBlockTokens}; ++row) {
        places[std::size_t{entry.slot()} * kBlockTokens + row] =
            place_of(shape, batch, number, block * kBlockTokens + row);
      }
    }
  }
  return places;
}

void add_embedding(const messages::Iteration& iteration, const ModelShape& shape,
                   IterationTable& table, TableWriter& writer) {
  std::vector<std::int32_t> tokens, positions;
  std::vector<RotaryPlace> places;
  for (const messages::MiniBatch* batch : *iteration.mini_batches()) {
    tokens.insert(tokens.end(), batch->tokens()->begin(), batch->tokens()->end());
    for (std::uint32_t number = 0; number < batch->sequences()->size(); ++number) {
      const messages::Sequence& sequence = *batch->sequences()->Get(number);
      for (std::uint32_t i = 0; i < sequence.new_tokens(); ++i) {
        positions.push_back(to_int(sequence.context() + i));
        if (shape.turns_heads()) {
          places.push_back(place_of(shape, *batch, number, sequence.context() + i));
        }
      }
    }
  }
  table.tokens = writer.add(tokens);
  table.positions = writer.add(positions);
  if (!places.empty()) {
    table.places = writer.add(places);
  }
}

// Where attention finds a block. The KV buffer is laid out from its end, as the KV blocks are in a
// pool, so that a run of blocks is contiguous on both sides.
ContextBlock context_block(const messages::AttentionEntry& entry, const DeviceLimits& limits,
                           const PoolPartition& pool) {
  if (entry.where() == messages::Where::RegeneratedKv) {
    return {.slot = entry.slot(), .buffer = 1, .unused = {}};
  }
  if (entry.where() == messages::Where::Activation) {
    return {.slot = entry.slot(), .buffer = 3, .unused = {}};
  }
  if (entry.where() == messages::Where::HostInPlace) {
    return {.slot = pool.kv_blocks - 1 - entry.block(), .buffer = 0, .unused = {}};
  }
  const auto from_end = [](std::int32_t all, std::uint32_t n) {
    return static_cast<std::uint32_t>(all) - 1 - n;
  };
  return entry.place() == messages::Place::Gpu
             ? ContextBlock{.slot = from_end(limits.gpu_kv_blocks, entry.block()),
                            .buffer = 2,
                            .unused = {}}
             : ContextBlock{
                   .slot = from_end(limits.kv_slots, entry.slot()), .buffer = 0, .unused = {}};
}

// How many positions a sequence attends straight from activations.
std::int64_t absorbed_positions(const messages::MiniBatch& batch,
                                const messages::Sequence& sequence) {
  std::int64_t positions = 0;
  const std::uint32_t end = sequence.context() + sequence.new_tokens();
  for (std::uint32_t start = 0; start < end; start += kBlockTokens) {
    const auto* entry = batch.entries()->Get(sequence.first_entry() + start / kBlockTokens);
    positions += entry->where() == messages::Where::Activation
                     ? std::min<std::uint32_t>(end - start, kBlockTokens)
                     : 0;
  }
  return positions;
}

AttendedTogether together(const std::vector<AttentionSequence>& sequences) {
  AttendedTogether all{.count = static_cast<std::int32_t>(sequences.size())};
  for (const AttentionSequence& one : sequences) {
    all.max_new_tokens = std::max(all.max_new_tokens, one.new_tokens);
    all.max_context = std::max(all.max_context, one.context + one.new_tokens);
  }
  return all;
}

LayerTable layer_table(const messages::MiniBatch& batch, const ModelShape& shape,
                       const DeviceLimits& limits, const PoolPartition& pool, TableWriter& writer) {
  // Dropped blocks are not in the table. A sequence's first block counts them nevertheless, so that the j-th
  // block behind it is the j-th of its context; it may lie before the table.
  std::vector<ContextBlock> blocks;
  std::vector<std::int32_t> dropped_before;  // by entry
  for (const messages::AttentionEntry* entry : *batch.entries()) {
    dropped_before.push_back(static_cast<std::int32_t>(dropped_before.size() - blocks.size()));
    if (entry->place() != messages::Place::Dropped) {
      blocks.push_back(context_block(*entry, limits, pool));
    }
  }
  std::vector<AttentionSequence> one_row, more_rows, absorbed;
  std::array<std::vector<RowMove>, 4> moves;  // by buffer
  std::int64_t all_absorbed = 0;
  for (const messages::Sequence* sequence : *batch.sequences()) {
    const std::uint32_t first_entry = sequence->first_entry();
    // Its dropped entries come before all of the others.
    const std::int32_t before = dropped_before[first_entry + sequence->context() / kBlockTokens];
    const AttentionSequence one{.first_row = to_int(sequence->first_row()),
                                .new_tokens = to_int(sequence->new_tokens()),
                                .context = to_int(sequence->context()),
                                .first_block = to_int(first_entry) - before};
    const std::int64_t positions = absorbed_positions(batch, *sequence);
    (positions > 0 ? absorbed : one.new_tokens == 1 ? one_row : more_rows).push_back(one);
    all_absorbed += positions;
    for (std::uint32_t i = 0; i < sequence->new_tokens(); ++i) {
      const std::uint32_t position = sequence->context() + i;
      const ContextBlock& block = blocks[static_cast<std::size_t>(
          one.first_block + to_int(position / kBlockTokens))];
      moves[block.buffer].push_back(
          {.from = sequence->first_row() + i,
           .to = std::int64_t{block.slot} * kBlockTokens + position % kBlockTokens});
    }
  }
  LayerTable table{.kv_moves = static_cast<std::int32_t>(moves[0].size()),
                   .regenerated_moves = static_cast<std::int32_t>(moves[1].size()),
                   .here_moves = static_cast<std::int32_t>(moves[2].size()),
                   .act_moves = static_cast<std::int32_t>(moves[3].size()),
                   .one_row = together(one_row),
                   .more_rows = together(more_rows),
                   .absorbed = together(absorbed),
                   .absorbed_positions = all_absorbed};
  std::vector<RowMove> all;
  for (const std::vector<RowMove>& some : moves) {
    all.insert(all.end(), some.begin(), some.end());
  }
  std::vector<AttentionSequence> sequences = std::move(one_row);
  sequences.insert(sequences.end(), more_rows.begin(), more_rows.end());
  sequences.insert(sequences.end(), absorbed.begin(), absorbed.end());
  writer.begin_span();
  table.moves = writer.add(all);
  table.sequences = writer.add(sequences);
  table.blocks = writer.add(blocks);
  if (const std::vector<RotaryPlace> places = act_places(batch, shape); !places.empty()) {
    table.act_places = writer.add(places);
  }
  table.span = writer.end_span();
  return table;
}

// Collects the iteration's rows whose logits are wanted, and cuts them into chunks.
class HeadBuilder {
 public:
  explicit HeadBuilder(const DeviceLimits& limits) : limits_(limits) {}

  void add(const messages::Sample& sample, const messages::Sequence& sequence,
           MiniBatchWork& work) {
    const auto index = static_cast<std::uint32_t>(work.samples.size());
    work.samples.push_back({.request = sequence.request(), .logprobs = sample.logprobs() >= 0});
    for (std::uint32_t i = 0; i < sequence.new_tokens(); ++i) {
      const std::int32_t target = sample.prompt_logprobs() ? sample.prompt_targets()->Get(i) : -1;
      const bool generate = sample.generate() && i + 1 == sequence.new_tokens();
      if (target < 0 && !generate) {
        continue;
      }
      const std::uint32_t edits =
          generate && sample.edits() != nullptr ? sample.edits()->size() : 0;
      const std::uint32_t mask = generate && sample.mask() != nullptr ? sample.mask()->size() : 0;
      const auto mask_room = static_cast<std::uint32_t>(ceil_div(mask, kEditWords));
      const std::int32_t row =
          add_row(work.first_row + sequence.first_row() + i, edits + mask_room);
      if (target >= 0) {
        add_sample({.row = row, .logprobs = prompt_top(sample), .target = target});
        work.results.push_back({.sample = index, .prompt = true});
      }
      if (generate) {
        add_sample({.row = row,
                    .temperature = sample.temperature(),
                    .top_p = sample.top_p(),
                    .top_k = sample.top_k(),
                    .seed = sample.seed(),
                    .step = sample.step(),
                    .logprobs = sample.logprobs(),
                    .target = -1,
                    .min_p = sample.min_p(),
                    .only_edited = sample.only_edited() ? 1 : 0,
                    .first_edit = static_cast<std::int32_t>(chunks_.back().edits.size()),
                    .edits = to_int(edits),
                    .masked = mask > 0 ? 1 : 0});
        for (std::uint32_t e = 0; e < edits; ++e) {
          const messages::LogitEdit& edit = *sample.edits()->Get(e);
          chunks_.back().edits.push_back({.token = edit.token(),
                                          .bias = edit.bias(),
                                          .factor = edit.factor(),
                                          .minus = edit.minus()});
        }
        if (mask > 0) {
          std::vector<LogitEdit>& all = chunks_.back().edits;
          const std::size_t first = all.size();
          all.resize(first + mask_room);
          std::memcpy(&all[first], sample.mask()->data(), mask * sizeof(std::uint32_t));
        }
        work.results.push_back({.sample = index, .prompt = false});
      }
    }
  }

  std::vector<HeadChunk> finish(TableWriter& writer) {
    std::vector<HeadChunk> chunks;
    for (const Chunk& chunk : chunks_) {
      chunks.push_back({.moves = writer.add(chunk.moves),
                        .sample_rows = writer.add(chunk.samples),
                        .rows = static_cast<std::int32_t>(chunk.moves.size()),
                        .samples = static_cast<std::int32_t>(chunk.samples.size())});
    }
    return chunks;
  }

  // Each chunk's edits, in a span of their own.
  void finish_edits(TableWriter& writer, std::vector<HeadChunk>& chunks) const {
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      if (!chunks_[i].edits.empty()) {
        writer.begin_span();
        writer.add(chunks_[i].edits);
        chunks[i].edits = writer.end_span();
      }
    }
  }

 private:
  struct Chunk {
    std::vector<RowMove> moves;
    std::vector<SampleRow> samples;
    std::vector<LogitEdit> edits;
  };

  static std::int32_t prompt_top(const messages::Sample& sample) {
    return sample.prompt_top() >= 0 ? sample.prompt_top() : sample.logprobs();
  }

  std::int32_t add_row(std::int64_t from, std::uint32_t edits) {
    if (chunks_.empty() ||
        chunks_.back().moves.size() == static_cast<std::size_t>(limits_.logits_rows) ||
        chunks_.back().edits.size() + edits > static_cast<std::size_t>(limits_.logit_edits)) {
      chunks_.emplace_back();
    }
    auto& moves = chunks_.back().moves;
    moves.push_back({.from = from, .to = static_cast<std::int64_t>(moves.size())});
    return static_cast<std::int32_t>(moves.size()) - 1;
  }

  void add_sample(const SampleRow& row) { chunks_.back().samples.push_back(row); }

  const DeviceLimits& limits_;
  std::vector<Chunk> chunks_;
};

// KV blocks of the device: attention reads them there, and new rows are put there for it.
bool lies_where_read(BlockKind kind, messages::Place place) {
  return kind == BlockKind::kv && place == messages::Place::Gpu;
}

// Neighbouring ranges become one.
void add_range(const messages::SlotRange& range, std::vector<Regenerate>& ranges) {
  if (!ranges.empty() && ranges.back().first_slot + ranges.back().count == range.first_slot()) {
    ranges.back().count += range.count();
  } else {
    ranges.push_back({.first_slot = range.first_slot(), .count = range.count()});
  }
}

void add_copies(const messages::MiniBatch& batch, std::int32_t window, MiniBatchWork& work) {
  const BlockTables tables(batch);
  const SeenLines seen = seen_lines(tables, window);
  for (std::size_t i = 0; i < tables.loads.size(); ++i) {
    const messages::BlockRun& run = tables.loads[i];
    const auto kind = static_cast<BlockKind>(run.kind());
    const auto count = [&](BroughtBlocks& into) {
      (kind == BlockKind::kv ? into.kv : into.act) += run.count();
    };
    count(work.brought);
    if (seen.loads[i]) {
      count(work.brought_in_window);
    }
    if (lies_where_read(kind, run.place())) {
      continue;
    }
    work.loads.push_back({.kind = kind,
                          .place = run.place(),
                          .first_block = run.first_block(),
                          .first_slot = run.first_slot(),
                          .count = run.count(),
                          .tail_tokens = run.tail_tokens(),
                          .seen = seen.loads[i]});
  }
  for (std::size_t i = 0; i < tables.regenerate.size(); ++i) {
    add_range(tables.regenerate[i], work.brought.regenerate);
    if (seen.regenerate[i]) {
      add_range(tables.regenerate[i], work.brought_in_window.regenerate);
    }
  }
  if (batch.stores() != nullptr && !work.on_host) {
    for (const messages::Store* store : *batch.stores()) {
      if (lies_where_read(static_cast<BlockKind>(store->kind()), store->place())) {
        continue;
      }
      work.stores.push_back({.kind = static_cast<BlockKind>(store->kind()),
                             .place = store->place(),
                             .block = store->block(),
                             .token = store->token(),
                             .row = store->row(),
                             .count = store->count()});
    }
  }
}

// Rows that a layer with this window reads; 0: without one.
std::int64_t rows_read(const messages::MiniBatch& batch, std::int32_t window) {
  std::int64_t rows = 0;
  for (const messages::Sequence* sequence : *batch.sequences()) {
    rows += std::int64_t{sequence->context()} + sequence->new_tokens() -
            std::int64_t{unseen_blocks(to_int(sequence->context()), window)} * kBlockTokens;
  }
  return rows;
}

void add_host_attention(const messages::MiniBatch& batch, std::int32_t window,
                        MiniBatchWork& work) {
  work.on_host = batch.entries()->Get(0)->where() == messages::Where::HostInPlace;
  if (work.on_host) {
    work.host_rows = rows_read(batch, 0);
    work.host_rows_in_window = rows_read(batch, window);
  }
}

messages::LogprobRowT logprob_row(const SampledRow& row) {
  messages::LogprobRowT result;
  result.token = row.token;
  result.logprob = row.logprob;
  for (std::int32_t i = 0; i < row.top_count; ++i) {
    if (row.top_token[i] != row.token) {
      result.top.emplace_back(row.top_token[i], row.top_logprob[i]);
    }
  }
  return result;
}

}  // namespace

HostBuffer HostBuffers::take(Bytes size) {
  std::ranges::sort(free_, {}, &HostBuffer::size);
  const auto fits = std::ranges::lower_bound(free_, size, {}, &HostBuffer::size);
  if (fits == free_.end()) {
    if (!free_.empty()) {
      free_.pop_back();  // too small by now, and there are never more than work asks for
    }
    return device_.allocate_host(
        {static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(size.n)))});
  }
  HostBuffer buffer = std::move(*fits);
  free_.erase(fits);
  return buffer;
}

void HostBuffers::give_back(HostBuffer buffer) {
  if (buffer.data() != nullptr) {
    free_.push_back(std::move(buffer));
  }
}

IterationWork make_work(const messages::Iteration& iteration,
                        std::vector<std::vector<std::uint32_t>> after, const HostBlocks& blocks,
                        const ModelShape& shape, const DeviceLimits& limits, HostBuffers& buffers) {
  IterationWork work{.iteration = iteration.iteration(), .blocks = blocks};
  work.mini_batches.resize(iteration.mini_batches()->size());
  TableWriter writer;
  writer.begin_span();
  add_embedding(iteration, shape, work.table, writer);
  HeadBuilder head(limits);
  std::int64_t first_row = 0;
  for (const messages::MiniBatch* batch : *iteration.mini_batches()) {
    MiniBatchWork& one = work.mini_batches[batch->id()];
    one.rows = static_cast<std::int32_t>(batch->tokens()->size());
    one.first_row = first_row;
    first_row += one.rows;
    one.first_result = work.result_count;
    if (batch->samples() != nullptr) {
      for (const messages::Sample* sample : *batch->samples()) {
        head.add(*sample, *batch->sequences()->Get(sample->sequence()), one);
      }
    }
    work.result_count += static_cast<std::int64_t>(one.results.size());
  }
  work.head = head.finish(writer);
  work.table.span = writer.end_span();
  head.finish_edits(writer, work.head);
  for (const messages::MiniBatch* batch : *iteration.mini_batches()) {
    MiniBatchWork& one = work.mini_batches[batch->id()];
    one.after = std::move(after[batch->id()]);
    one.layer = layer_table(*batch, shape, limits, blocks.partition, writer);
    add_host_attention(*batch, shape.sliding_window, one);
    add_copies(*batch, shape.sliding_window, one);
  }
  const std::size_t size = writer.bytes().size();
  work.tables = buffers.take({static_cast<std::int64_t>(size)});
  std::memcpy(work.tables.data(), writer.bytes().data(), size);
  if (work.result_count > 0) {
    work.results = buffers.take({work.result_count * kSampledRowBytes});
  }
  return work;
}

LayerOrderWork make_order(const messages::LayerOrder& order, std::uint64_t seq) {
  LayerOrderWork work{.seq = seq, .iteration = order.iteration(), .stage = order.stage()};
  work.mini_batches.assign(order.mini_batches()->begin(), order.mini_batches()->end());
  if (order.fetch() != nullptr) {
    for (const messages::WeightFetch* fetch : *order.fetch()) {
      work.fetch.push_back(*fetch);
    }
  }
  return work;
}

messages::IterationDoneT results_of(const IterationWork& work) {
  messages::IterationDoneT done;
  done.iteration = work.iteration;
  for (const MiniBatchWork& batch : work.mini_batches) {
    std::vector<messages::SampleResultT> results(batch.samples.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      results[i].request = batch.samples[i].request;
    }
    for (std::size_t i = 0; i < batch.results.size(); ++i) {
      SampledRow row;
      std::memcpy(&row,
                  work.results.data() +
                      (batch.first_result + static_cast<std::int64_t>(i)) * kSampledRowBytes,
                  sizeof row);
      const ResultRow& of = batch.results[i];
      messages::SampleResultT& result = results[of.sample];
      result.finite = result.finite && row.token != kNotFinite;
      if (of.prompt) {
        result.prompt.push_back(std::make_unique<messages::LogprobRowT>(logprob_row(row)));
      } else {
        result.token = std::max(row.token, -1);
        result.barred = row.token == kAllBarred;
        if (batch.samples[of.sample].logprobs) {
          result.chosen = std::make_unique<messages::LogprobRowT>(logprob_row(row));
        }
      }
    }
    for (messages::SampleResultT& result : results) {
      done.results.push_back(std::make_unique<messages::SampleResultT>(std::move(result)));
    }
  }
  return done;
}

}  // namespace poise
