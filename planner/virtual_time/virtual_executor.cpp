#include "planner/virtual_time/virtual_executor.h"

#include <algorithm>
#include <utility>

#include "common/liveness/progress.h"
#include "planner/virtual_time/link_idle.h"

namespace poise {
namespace {

// Layers, until the link is as idle in each as in the one before, or nearly so.
constexpr std::int32_t kUntilSettled = 12;

// Of the products before attention, by what they multiply.
double kv_share_of(const Slab& layer) {
  const auto bytes = [&](Weight weight) {
    const WeightEntry* entry = layer.find(weight);
    return entry == nullptr ? 0.0 : static_cast<double>(entry->bytes.n);
  };
  const double kv = bytes(Weight::w_kv), all = kv + bytes(Weight::w_q);
  return all > 0 ? kv / all : 1;
}

bool most_have_one(const LayerWindows& windows) {
  const auto count = std::ranges::count_if(windows, [](auto one) { return one > 0; });
  return 2 * count > std::ssize(windows);
}

// Of a layer that brings these pieces. Its loads and its host cores are taken to begin at the same time: its queries are
// made first.
Profile::Paces paces_of(const std::vector<BatchCost>& costs,
                        const std::vector<messages::WeightFetch>& pieces,
                        const VirtualWeights& weights, const Profile& profile) {
  Seconds beside{}, alone{};
  Profile::LinkTime link;
  for (const BatchCost& one : costs) {
    beside += one.host;
    alone += one.host_alone;
    link.kv += one.load_kv;
    link.rest += one.load_act;
  }
  if (beside.n <= 0) {
    return {};
  }
  for (const messages::WeightFetch& piece : pieces) {
    link.rest += profile.load_w(weights.share(piece.piece()));
  }
  return profile.paces(link, beside, alone);
}

}  // namespace

VirtualExecutor::VirtualExecutor(const Profile& profile, const WeightLayout& layout,
                                 const DeviceLimits& limits, LayerWindows windows)
    : profile_(profile),
      limits_(limits),
      windows_(std::move(windows)),
      layers_(layout.layers),
      kv_share_(kv_share_of(layout.layer)),
      weight_stream_(layout, limits),
      weights_(layout, limits),
      streams_(profile.event_latency),
      sides_(static_cast<std::size_t>(limits.sides)),
      stored_(static_cast<std::size_t>(layout.layers)) {}

LinkIdle VirtualExecutor::run(const messages::IterationT& tables, bool last) {
  note_progress();  // a plan may take very many of these
  Batches batches{.costs = {},
                  .in_window = {},
                  .groups = row_groups(tables, limits_.max_mini_batch_rows),
                  .products = {},
                  .count = static_cast<std::uint32_t>(tables.mini_batches.size())};
  for (const RowGroup& group : batches.groups) {
    batches.products.push_back(
        {.qkv = profile_.qkv_of(group.rows), .forward = profile_.forward_of(group.rows)});
  }
  double samples = 0;
  for (const auto& batch : tables.mini_batches) {
    batches.costs.push_back(batch_cost(profile_, *batch, limits_, 0));
    if (!windows_.empty()) {
      batches.in_window.push_back(batch_cost(profile_, *batch, limits_, window_of(windows_)));
    }
    samples += static_cast<double>(batch->samples.size());
  }
  LinkIdle idle;
  if (weight_stream_.streams()) {
    idle.behind = link_idle(batches.costs_with(most_have_one(windows_)), batches.groups,
                            batches.products, sides_.size(), std::min(layers_, kUntilSettled));
    idle.weights = profile_.load_w(1);
  }
  // Nothing of an iteration is ordered before the results of the one before are there.
  now_ += now_.n > 0 ? profile_.between : Seconds{};
  streams_.begin(now_);
  const auto layers = static_cast<std::uint32_t>(layers_);
  run_embedding(tables, weight_stream_.next(0, batches.count, last, idle));
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    run_layer(layer, batches, weight_stream_.next(layer + 1, batches.count, last, idle));
  }
  busy_.paces = {};
  const auto pieces = weight_stream_.next(layers + 1, batches.count, last, idle);
  for (std::uint32_t i = 0; i < batches.count; ++i) {
    fetch(pieces, i);
  }
  run_head(samples);
  now_ = streams_.end();
  return idle;
}

void VirtualExecutor::run_embedding(const messages::IterationT& tables,
                                    const std::vector<messages::WeightFetch>& pieces) {
  double rows = 0;
  for (const auto& batch : tables.mini_batches) {
    rows += static_cast<double>(batch->tokens.size());
  }
  const Seconds there = streams_.add(VirtualStream::copy_in, {}, profile_.tables(rows));
  for (std::uint32_t i = 0; i < tables.mini_batches.size(); ++i) {
    fetch(pieces, i);
    compute(there, profile_.embed(static_cast<double>(tables.mini_batches[i]->tokens.size())),
            {.kind = VirtualSpan::Kind::products});
  }
}

void VirtualExecutor::run_head(double samples) {
  for (double left = samples; left > 0; left -= limits_.logits_rows) {
    const double rows = std::min<double>(left, limits_.logits_rows);
    const Seconds made = compute({}, profile_.head(rows), {.kind = VirtualSpan::Kind::head});
    streams_.add(VirtualStream::copy_out, made, profile_.results(rows));
  }
}

void VirtualExecutor::fetch(const std::vector<messages::WeightFetch>& pieces,
                            std::uint32_t mini_batch) {
  for (const messages::WeightFetch& piece : pieces) {
    if (piece.after_mini_batch() == mini_batch) {
      const Seconds time = profile_.load_w(weights_.share(piece.piece())) * busy_.paces.link;
      busy_.link += weights_.fetch(piece, time, streams_);
      volume_.layers += weights_.share(piece.piece());
    }
  }
}

void VirtualExecutor::run_layer(std::uint32_t layer, const Batches& batches,
                                const std::vector<messages::WeightFetch>& pieces) {
  const std::vector<BatchCost>& costs =
      batches.costs_with(!windows_.empty() && windows_[layer] > 0);
  const std::size_t first_visit = visits_;
  visits_ += static_cast<std::size_t>(
      std::ranges::count_if(costs, [](const BatchCost& one) { return !one.on_host; }));
  const auto load_next = [&](std::size_t i) {
    const auto id = static_cast<std::uint32_t>(i);
    if (!costs[i].on_host) {
      load(costs[i], (first_visit + i) % sides_.size(), i == 0 ? stored_[layer] : Seconds{},
           {.kind = VirtualSpan::Kind::load, .layer = layer, .mini_batch = id});
    }
    fetch(pieces, id);
  };
  busy_.paces = paces_of(costs, pieces, weights_, profile_);
  load_next(0);
  const bool queries_wait = weights_.brought_by(pieces, layer, Weight::w_q);
  const RowGroup* const ahead = queries_wait ? nullptr : sent_ahead(batches.groups);
  std::vector<Seconds> attended_ahead;
  if (ahead != nullptr) {  // the next group's queries lie where those that go down did
    compute(std::max({rows_stored_[groups_++ % 2], weights_.arrived(layer, Weight::w_kv),
                      weights_.arrived(layer, Weight::w_q)}),
            profile_.qkv_of(ahead->rows), {.kind = VirtualSpan::Kind::products, .layer = layer});
    attended_ahead = send(costs, *ahead, layer);
    compute(streams_.end(VirtualStream::copy_out), {}, {});
  }
  for (std::size_t number = 0; number < batches.groups.size(); ++number) {
    const RowGroup& group = batches.groups[number];
    const auto& [qkv, forward] = batches.products[number];
    const bool sent = &group == ahead;
    Seconds& rows_stored = rows_stored_[sent ? 0 : groups_++ % 2];
    const auto span = [&](VirtualSpan::Kind kind, std::size_t i) {
      return VirtualSpan{.kind = kind, .layer = layer, .mini_batch = static_cast<std::uint32_t>(i)};
    };
    const VirtualSpan of_rows{.kind = VirtualSpan::Kind::products, .layer = layer};
    const bool regenerate_first = queries_wait && group.begin == 0 && !costs[0].on_host;
    const Seconds kv = regenerate_first ? qkv * kv_share_ : qkv;
    const Seconds for_kv = std::max(rows_stored, weights_.arrived(layer, Weight::w_kv));
    const Seconds for_queries = weights_.arrived(layer, Weight::w_q);
    if (!sent) {
      compute(regenerate_first ? for_kv : std::max(for_kv, for_queries), kv, of_rows);
      if (const auto stored = store(batches, group, layer)) {
        rows_stored = stored_[layer] = *stored;
      }
    }
    if (regenerate_first) {
      regenerate(costs[0], first_visit % sides_.size(), span(VirtualSpan::Kind::kv_gen, 0));
      compute(for_queries, qkv - kv, of_rows);
    }
    const std::vector<Seconds> attended = sent ? attended_ahead : send(costs, group, layer);
    for (std::size_t i = group.begin; i < group.end; ++i) {
      if (i + 1 < batches.count) {
        load_next(i + 1);
      }
      if (costs[i].on_host) {
        compute(attended[i - group.begin], costs[i].up, span(VirtualSpan::Kind::attention, i));
        continue;
      }
      const std::size_t side = (first_visit + i) % sides_.size();
      if (!regenerate_first || i > group.begin) {
        regenerate(costs[i], side, span(VirtualSpan::Kind::kv_gen, i));
      }
      sides_[side].computed =
          compute(sides_[side].loaded, costs[i].attend, span(VirtualSpan::Kind::attention, i));
    }
    compute(weights_.arrived(layer, Weight::fc2), forward - qkv, of_rows);
  }
  weights_.computed(layer, streams_.end(VirtualStream::compute));
}

std::vector<Seconds> VirtualExecutor::send(const std::vector<BatchCost>& costs,
                                           const RowGroup& group, std::uint32_t layer) {
  double rows = 0;
  for (std::size_t i = group.begin; i < group.end; ++i) {
    rows += costs[i].host_rows;
  }
  if (rows <= 0) {
    return {};
  }
  std::vector<Seconds> attended(group.end - group.begin);
  const Seconds down =
      streams_.add(VirtualStream::copy_out, streams_.end(VirtualStream::compute),
                   profile_.host_down(rows), {.kind = VirtualSpan::Kind::store, .layer = layer});
  for (std::size_t i = group.begin; i < group.end; ++i) {
    if (costs[i].on_host) {
      const Seconds time = costs[i].host * busy_.paces.host;
      busy_.host += time;
      attended[i - group.begin] = streams_.add(VirtualStream::host, down, time,
                                               {.kind = VirtualSpan::Kind::host,
                                                .layer = layer,
                                                .mini_batch = static_cast<std::uint32_t>(i)});
    }
  }
  stored_[layer] = std::max(stored_[layer], streams_.end(VirtualStream::host));
  return attended;
}

void VirtualExecutor::load(const BatchCost& batch, std::size_t side, Seconds stored,
                           VirtualSpan span) {
  Side& to = sides_[side];
  const Seconds act = batch.load_act * busy_.paces.link, kv = batch.load_kv * busy_.paces.link;
  to.act_loaded = streams_.add(VirtualStream::copy_in, std::max(to.computed, stored), act, span);
  to.loaded = streams_.add(VirtualStream::copy_in, {}, kv, span);
  busy_.link += act + kv;
  volume_.kv += batch.kv;
  volume_.act += batch.act;
  if (batch.here.n > 0) {
    to.here = streams_.add(VirtualStream::copy_out, to.computed, batch.here);
  }
}

void VirtualExecutor::regenerate(const BatchCost& batch, std::size_t side, VirtualSpan span) {
  compute(std::max(sides_[side].act_loaded, sides_[side].here), batch.regenerate, span);
}

std::optional<Seconds> VirtualExecutor::store(const Batches& batches, const RowGroup& group,
                                              std::uint32_t layer) {
  double kv = 0, act = 0;
  for (std::size_t i = group.begin; i < group.end; ++i) {
    kv += batches.costs[i].stored_kv;
    act += batches.costs[i].stored_act;
  }
  if (kv + act <= 0) {
    return std::nullopt;
  }
  return streams_.add(VirtualStream::copy_out, streams_.end(VirtualStream::compute),
                      profile_.store_kv(kv) + profile_.store_act(act),
                      {.kind = VirtualSpan::Kind::store, .layer = layer});
}

Seconds VirtualExecutor::compute(Seconds needed, Seconds time, VirtualSpan span) {
  busy_.compute += time;
  return streams_.add(VirtualStream::compute, needed, time, span);
}

}  // namespace poise
