#include "planner/virtual_time/virtual_executor.h"

#include <algorithm>

#include "common/trouble.h"
#include "planner/costs/prefill_pairs.h"

namespace poise {
namespace {

double tokens_of(const messages::BlockRun& run) {
  return (run.count() - 1.0) * kBlockTokens + run.tail_tokens();
}

}  // namespace

VirtualExecutor::VirtualExecutor(const Profile& profile, const WeightLayout& layout,
                                 const DeviceLimits& limits)
    : profile_(profile),
      layout_(layout),
      limits_(limits),
      weights_(layout, limits),
      stored_(static_cast<std::size_t>(layout.layers)) {
  for (const WeightEntry& entry : layout.layer.entries) {
    if (entry.weight == Weight::w_kv || entry.weight == Weight::w_q) {
      qkv_piece_ = std::max(qkv_piece_, static_cast<std::size_t>(entry.last_piece));
    }
  }
}

void VirtualExecutor::run(const messages::IterationT& tables, bool last) {
  std::vector<Batch> batches;
  double samples = 0;
  for (const auto& batch : tables.mini_batches) {
    batches.push_back(costs_of(*batch));
    samples += static_cast<double>(batch->samples.size());
  }
  const auto layers = static_cast<std::uint32_t>(layout_.layers);
  const auto count = static_cast<std::uint32_t>(batches.size());
  // Nothing of an iteration is ordered before the results of the one before are there.
  now_ += now_.n > 0 ? profile_.between : Seconds{};
  double rows = 0;
  for (const Batch& batch : batches) {
    rows += batch.rows;
  }
  copy_in_ = std::max(copy_in_, now_) + profile_.tables(rows);
  for (std::uint32_t stage = 0; stage < layers + 2; ++stage) {
    const auto pieces = weights_.next(stage, count, last);
    if (stage >= 1 && stage <= layers) {
      run_layer(stage - 1, batches, pieces);
      continue;
    }
    const Seconds tables = copy_in_;
    for (std::uint32_t i = 0; i < count; ++i) {
      fetch(pieces, i);
      if (stage == 0) {
        compute(tables, profile_.embed(batches[i].rows), {.kind = VirtualSpan::Kind::products});
      }
    }
    if (stage > layers) {
      run_head(samples);
    }
  }
  now_ = std::max({copy_in_, compute_, copy_out_});
}

void VirtualExecutor::run_head(double samples) {
  for (double left = samples; left > 0; left -= limits_.logits_rows) {
    const double rows = std::min<double>(left, limits_.logits_rows);
    compute(now_, profile_.head(rows), {.kind = VirtualSpan::Kind::head});
    copy_out_ = start(copy_out_, compute_) + profile_.results(rows);
  }
}

VirtualExecutor::Batch VirtualExecutor::costs_of(const messages::MiniBatchT& batch) const {
  double kv = 0, act = 0, here = 0, regenerated = 0, decoded = 0, pairs = 0, prompts = 0;
  for (const messages::BlockRun& run : batch.loads) {
    const bool is_kv = run.kind() == messages::Kind::Kv;
    if (run.place() != messages::Place::Gpu) {
      (is_kv ? kv : act) += tokens_of(run) / kBlockTokens;
    } else if (!is_kv) {  // KV blocks there are read where they lie
      here += tokens_of(run) / kBlockTokens;
    }
  }
  for (const auto& range : batch.regenerate) {
    regenerated += range.count();
  }
  for (const messages::Sequence& sequence : batch.sequences) {
    pairs += prefill_pairs(sequence);
    prompts += sequence.new_tokens() > 1 ? sequence.new_tokens() : 0;
    decoded += sequence.new_tokens() == 1
                   ? static_cast<double>(ceil_div(sequence.context() + 1, kBlockTokens))
                   : 0;
  }
  Batch costs{
      .load = profile_.load_kv(kv) + profile_.load_act(act),
      .here = profile_.load_here(here),
      .regenerate = profile_.kv_gen(regenerated),
      .attend = profile_.attention_beside(here > 0)(decoded) + profile_.prefill_of(pairs, prompts),
      .rows = static_cast<double>(batch.tokens.size()),
      .kv = kv,
      .act = act};
  if (kv > 0 && act > 0) {  // in one copy, which begins once
    costs.load -= Seconds{std::min(profile_.load_kv.a, profile_.load_act.a)};
  }
  for (const auto& store : batch.stores) {
    if (store.place() == messages::Place::Host) {
      (store.kind() == messages::Kind::Kv ? costs.stored_kv : costs.stored_act) += store.count();
    }
  }
  return costs;
}

void VirtualExecutor::fetch(const std::vector<messages::WeightFetch>& pieces,
                            std::uint32_t mini_batch) {
  for (const messages::WeightFetch& piece : pieces) {
    if (piece.after_mini_batch() != mini_batch) {
      continue;
    }
    const bool begun = std::ranges::any_of(
        buffers_, [&](const Buffer& buffer) { return buffer.layer == piece.layer(); });
    if (!begun) {
      Buffer& next = buffers_[fetched_layers_++ % buffers_.size()];
      next.layer = piece.layer();
      next.arrived.assign(layout_.layer.pieces.size(), Seconds{});
    }
    Buffer& buffer = buffers_[buffers_[0].layer == piece.layer() ? 0 : 1];
    const double share = static_cast<double>(layout_.layer.pieces[piece.piece()].bytes.n) /
                         static_cast<double>(layout_.layer.bytes.n);
    const Seconds time = profile_.load_w(share);
    copy_in_ = start(copy_in_, buffer.computed) + time;
    link_busy_ += time;
    volume_.layers += share;
    note({.kind = VirtualSpan::Kind::weights, .layer = piece.layer()}, copy_in_, time);
    buffer.arrived[piece.piece()] = copy_in_;
  }
}

void VirtualExecutor::run_layer(std::uint32_t layer, const std::vector<Batch>& batches,
                                const std::vector<messages::WeightFetch>& pieces) {
  const std::size_t first_visit = visits_;
  visits_ += batches.size();
  const auto load_next = [&](std::size_t i) {
    load(batches[i], (first_visit + i) % 2, i == 0 ? stored_[layer] : Seconds{},
         {.kind = VirtualSpan::Kind::load,
          .layer = layer,
          .mini_batch = static_cast<std::uint32_t>(i)});
    fetch(pieces, static_cast<std::uint32_t>(i));
  };
  load_next(0);
  for (std::size_t begin = 0, end = 0; begin < batches.size(); begin = end) {
    // Of neighbours that go through the row-wise products together.
    double rows = 0, stored_kv = 0, stored_act = 0;
    for (; end < batches.size() &&
           (end == begin || rows + batches[end].rows <= limits_.max_mini_batch_rows);
         ++end) {
      rows += batches[end].rows;
      stored_kv += batches[end].stored_kv;
      stored_act += batches[end].stored_act;
    }
    Seconds& rows_stored = rows_stored_[groups_++ % 2];
    const Seconds first = profile_.qkv_of(rows);
    const VirtualSpan of_rows{.kind = VirtualSpan::Kind::products, .layer = layer};
    compute(std::max(rows_stored, arrived(layer, qkv_piece_)), first, of_rows);
    if (stored_kv + stored_act > 0) {
      const Seconds stores = profile_.store_kv(stored_kv) + profile_.store_act(stored_act);
      copy_out_ = start(copy_out_, compute_) + stores;
      note({.kind = VirtualSpan::Kind::store, .layer = layer}, copy_out_, stores);
      rows_stored = stored_[layer] = copy_out_;
    }
    for (std::size_t i = begin; i < end; ++i) {
      if (i + 1 < batches.size()) {
        load_next(i + 1);
      }
      const std::size_t side = (first_visit + i) % 2;
      const Seconds there = std::max(loaded_[side], here_[side]);
      VirtualSpan span{.kind = VirtualSpan::Kind::kv_gen,
                       .layer = layer,
                       .mini_batch = static_cast<std::uint32_t>(i)};
      compute(there, batches[i].regenerate, span);
      span.kind = VirtualSpan::Kind::attention;
      compute(there, batches[i].attend, span);
      computed_[side] = compute_;
    }
    compute(arrived(layer, layout_.layer.pieces.size() - 1), profile_.forward_of(rows) - first,
            of_rows);
  }
  for (Buffer& buffer : buffers_) {
    if (buffer.layer == layer) {
      buffer.computed = compute_;
    }
  }
}

void VirtualExecutor::load(const Batch& batch, std::size_t side, Seconds stored, VirtualSpan span) {
  copy_in_ = start(std::max(copy_in_, now_), std::max(computed_[side], stored)) + batch.load;
  link_busy_ += batch.load;
  volume_.kv += batch.kv;
  volume_.act += batch.act;
  note(span, copy_in_, batch.load);
  loaded_[side] = copy_in_;
  if (batch.here.n > 0) {
    copy_out_ = start(std::max(copy_out_, now_), computed_[side]) + batch.here;
    here_[side] = copy_out_;
  }
}

Seconds VirtualExecutor::start(Seconds free, Seconds needed) const {
  return needed > free ? needed + profile_.event_latency : free;
}

void VirtualExecutor::compute(Seconds from, Seconds time, VirtualSpan span) {
  compute_ = start(std::max(compute_, now_), from) + time;
  compute_busy_ += time;
  note(span, compute_, time);
}

void VirtualExecutor::note(VirtualSpan span, Seconds end, Seconds time) {
  if (spans_ != nullptr && time.n > 0) {
    span.begin = end - time;
    span.end = end;
    spans_->push_back(span);
  }
}

Seconds VirtualExecutor::arrived(std::uint32_t layer, std::size_t last) const {
  if (is_resident(limits_, LayerId{layer}, layout_.layers)) {
    return {};
  }
  for (const Buffer& buffer : buffers_) {
    if (buffer.layer == layer) {
      return *std::max_element(buffer.arrived.begin(),
                               buffer.arrived.begin() + static_cast<std::ptrdiff_t>(last) + 1);
    }
  }
  check(false, "a streamed layer is fetched before it is computed");
  return {};
}

}  // namespace poise
