// Collects times from the spans of profiling's iterations, and fits lines to them.

#include <algorithm>
#include <cmath>

#include "common/row_groups.h"
#include "common/trouble.h"
#include "planner/costs/prefill_pairs.h"
#include "planner/profile/profiling.h"

namespace poise {
namespace {

using messages::SpanKind;

// The shares of a span during which other streams worked: up to the first it counts as alone, from the
// second on as together.
constexpr double kAlone = 0.1;
constexpr double kTogether = 0.5;
// Of a span of host cores, the share during which the link is busy, where that is what is measured; and the other way round.
constexpr double kBesideOther = 0.9;
// Of the time of rows that attend activations, what is left for their blocks at least.
constexpr double kShortestPart = 1e-3;
constexpr std::size_t kCopyIn = 0, kCompute = 1, kHost = 3;  // streams

double median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

// When a stream worked: begins and ends of its spans, in order and without overlap.
class Busy {
 public:
  void add(std::int64_t begin, std::int64_t end) { spans_.emplace_back(begin, end); }
  void finish() {
    std::ranges::sort(spans_);
    sums_.assign(1, 0);
    for (const auto& [begin, end] : spans_) {
      sums_.push_back(sums_.back() + (end - begin));
    }
  }
  // Time at work before `until`.
  std::int64_t before(std::int64_t until) const {
    const auto next = std::ranges::lower_bound(spans_, until, {}, &Span::first);
    const auto count = static_cast<std::size_t>(next - spans_.begin());
    const std::int64_t over = count > 0 ? std::max<std::int64_t>(0, next[-1].second - until) : 0;
    return sums_[count] - over;
  }

 private:
  using Span = std::pair<std::int64_t, std::int64_t>;
  std::vector<Span> spans_;
  std::vector<std::int64_t> sums_;
};

// What a mini-batch brings, in the units of the lines.
struct Brought {
  double kv = 0, act = 0, here = 0;  // blocks
  double regenerated = 0, entries = 0, pairs = 0;
  double rows = 0, stored_kv = 0, stored_act = 0;
  bool on_host = false;
  double host_blocks = 0;  // as far as they hold rows
  std::size_t group = 0;
};

Brought brought_by(const messages::MiniBatchT& batch) {
  Brought brought{.entries = static_cast<double>(batch.entries.size()),
                  .rows = static_cast<double>(batch.tokens.size())};
  for (const messages::BlockRun& run : batch.loads) {
    const double blocks = run.count() - 1 + run.tail_tokens() / double{kBlockTokens};
    (run.place() == messages::Place::Gpu ? brought.here
     : run.kind() == messages::Kind::Act ? brought.act
                                         : brought.kv) += blocks;
  }
  for (const messages::SlotRange& range : batch.regenerate) {
    brought.regenerated += range.count();
  }
  for (const messages::Sequence& sequence : batch.sequences) {
    brought.pairs += prefill_pairs(sequence);
  }
  brought.on_host =
      !batch.entries.empty() && batch.entries[0].where() == messages::Where::HostInPlace;
  if (brought.on_host) {
    for (const messages::Sequence& sequence : batch.sequences) {
      brought.host_blocks +=
          static_cast<double>(sequence.context() + sequence.new_tokens()) / kBlockTokens;
    }
    return brought;  // host cores write its rows
  }
  for (const messages::Store& store : batch.stores) {
    (store.kind() == messages::Kind::Act ? brought.stored_act : brought.stored_kv) += store.count();
  }
  return brought;
}

}  // namespace

// Goes through the spans of one iteration.
class ProfileTimes::Reader {
 public:
  Reader(ProfileTimes& times, ProfileWork work, const messages::IterationT& tables,
         const std::vector<StageSpan>& spans)
      : times_(times),
        busy_work_(work == ProfileWork::context_busy),
        beside_link_(work == ProfileWork::context_host_link),
        absorbs_(work == ProfileWork::context_absorbed),
        prompts_(work == ProfileWork::prompts_kv || work == ProfileWork::prompts_act) {
    for (const auto& batch : tables.mini_batches) {
      brought_.push_back(brought_by(*batch));
      rows_ += brought_.back().rows;
      samples_ += static_cast<double>(batch->samples.size());
    }
    const auto groups = row_groups(tables, times.limits_.max_mini_batch_rows);
    for (std::size_t group = 0; group < groups.size(); ++group) {
      for (std::size_t i = groups[group].begin; i < groups[group].end; ++i) {
        brought_[i].group = group;
      }
    }
    groups_.resize(groups.size());
    for (const Brought& one : brought_) {
      groups_[one.group].rows += one.rows;
      groups_[one.group].host_rows += one.on_host ? one.rows : 0;
      groups_[one.group].stored_kv += one.stored_kv;
      groups_[one.group].stored_act += one.stored_act;
    }
    for (const auto& [stage, span] : spans) {
      busy_.at(span.stream()).add(span.begin_ns(), span.end_ns());
    }
    for (Busy& one : busy_) {
      one.finish();
    }
  }

  void read(const std::vector<StageSpan>& spans) {
    std::uint32_t stage = 0;
    for (const auto& [of, span] : spans) {
      if (of != stage) {
        add_products();
        loaded_.clear();
        stage = of;
        head_left_ = samples_;
      }
      take(span);
    }
    add_products();
  }

 private:
  struct Group {
    double rows = 0, stored_kv = 0, stored_act = 0, host_rows = 0;
    Time qkv{}, all{};  // of this layer so far
  };

  static double seconds_of(const messages::Span& span) {
    return static_cast<double>(span.end_ns() - span.begin_ns()) * 1e-9;
  }
  // The share of `span` during which that stream worked.
  double overlap_with(std::size_t stream, const messages::Span& span) const {
    const auto busy = busy_[stream].before(span.end_ns()) - busy_[stream].before(span.begin_ns());
    const double seconds = seconds_of(span);
    return seconds > 0 ? static_cast<double>(busy) * 1e-9 / seconds : 0;
  }
  Time time_of(const messages::Span& span) const {
    double overlap = 0;
    for (std::size_t stream = 0; stream < busy_.size(); ++stream) {
      if (stream != span.stream()) {
        overlap = std::max(overlap, overlap_with(stream, span));
      }
    }
    return {seconds_of(span), overlap};
  }

  // T_host beside the link counts only where the link was busy all the while; alone, where nothing else worked.
  void take_host(const messages::Span& span, const Brought& batch, const Time& time) {
    if (span.kind() == SpanKind::HostRows) {
      times_.add(span.stream() == kCompute ? &Profile::host_up : &Profile::host_down,
                 span.stream() == kCompute ? batch.rows : groups_[batch.group].host_rows, time);
    } else if (!beside_link_ || overlap_with(kCopyIn, span) >= kBesideOther) {
      times_.add(&Profile::host_attention, batch.host_blocks, time);
    }
  }
  // Beside host cores nothing else counts but whole loads.
  void take_beside_host(const messages::Span& span, const Brought& batch, const Time& time) {
    if (span.kind() == SpanKind::Load && overlap_with(kHost, span) >= kBesideOther) {
      times_.add(&Profile::load_beside_host, batch.kv, time);
      times_.add(&Profile::load_act_beside_host, batch.act, time);
    }
  }

  // Rows of one block each, or of many: their own part is taken away once it is known (fit).
  void take_absorbed(const messages::Span& span, const Brought& batch, const Time& time) {
    if (span.kind() != SpanKind::Attention) {
      return;
    }
    const bool one_each = batch.entries <= batch.rows;
    times_.add(one_each ? &Profile::absorb_rows : &Profile::absorb,
               one_each ? batch.rows : batch.entries - batch.rows, time);
    times_.absorbing_rows_ = one_each ? times_.absorbing_rows_ : batch.rows;
  }

  // The latency of work that waited for a mini-batch's blocks. `loaded_`: when blocks arrived, of
  // mini-batches whose computation has not begun.
  void take_event_latency(const messages::Span& span) {
    if (span.stream() != 1) {
      if (span.kind() == SpanKind::Load) {
        std::int64_t& end = loaded_[span.mini_batch()];
        end = std::max(end, span.end_ns());
      }
      return;
    }
    if (span.kind() == SpanKind::KvGen || span.kind() == SpanKind::Attention) {
      const auto found = loaded_.find(span.mini_batch());
      if (found != loaded_.end()) {
        if (found->second > computed_) {
          const std::int64_t late = std::max<std::int64_t>(0, span.begin_ns() - found->second);
          times_.event_latencies_.push_back(static_cast<double>(late) * 1e-9);
        }
        loaded_.erase(found);
      }
    }
    computed_ = span.end_ns();
  }

  void take(const messages::Span& span) {
    const Time time = time_of(span);
    const Brought& batch =
        brought_.at(std::min<std::size_t>(span.mini_batch(), brought_.size() - 1));
    if (absorbs_) {
      take_absorbed(span, batch, time);
      return;
    }
    take_event_latency(span);
    if (span.kind() == SpanKind::HostAttention || span.kind() == SpanKind::HostRows) {
      take_host(span, batch, time);
    }
    if (beside_link_) {
      take_beside_host(span, batch, time);
      return;
    }
    switch (span.kind()) {
      case SpanKind::Load:
        if (busy_work_ && span.stream() == 2) {
          break;  // such copies fill the gaps that products leave, however long those take
        }
        times_.add(span.stream() == 2 ? &Profile::load_here
                   : batch.kv > 0     ? &Profile::load_kv
                                      : &Profile::load_act,
                   span.stream() == 2 ? batch.here
                   : batch.kv > 0     ? batch.kv
                                      : batch.act,
                   time);
        break;
      case SpanKind::Weights: {
        const auto& pieces = times_.layout_.layer.pieces;
        times_.add(&Profile::load_w,
                   static_cast<double>(pieces.at(span.piece()).bytes.n) /
                       static_cast<double>(times_.layout_.layer.bytes.n),
                   time);
        break;
      }
      case SpanKind::Embed:
        times_.add(&Profile::embed, batch.rows, time);
        break;
      case SpanKind::KvGen:
        if (busy_work_ || time.overlap <= kAlone) {
          times_.add(&Profile::kv_gen, batch.regenerated,
                     {time.seconds, busy_work_ ? kTogether : time.overlap});
        }
        break;
      case SpanKind::Attention:
        if (batch.pairs > 0) {
          times_.add(&Profile::prefill, batch.pairs, time);
        } else if (busy_work_ || time.overlap <= kAlone) {
          times_.add(&Profile::attention, batch.entries,
                     {time.seconds, busy_work_ ? kTogether : time.overlap});
        }
        break;
      case SpanKind::Qkv:
      case SpanKind::Projection:
      case SpanKind::Fc1:
      case SpanKind::Fc2:
        add_product(groups_[batch.group], span.kind() == SpanKind::Qkv, time);
        break;
      case SpanKind::Head: {
        const double rows = std::min<double>(head_left_, times_.limits_.logits_rows);
        head_left_ -= rows;
        head_rows_ = rows;
        times_.add(&Profile::head, rows, time);
        break;
      }
      case SpanKind::Store: {
        const Group& group = groups_[batch.group];
        times_.add(group.stored_kv > 0 ? &Profile::store_kv : &Profile::store_act,
                   group.stored_kv > 0 ? group.stored_kv : group.stored_act, time);
        break;
      }
      case SpanKind::Tables:
        times_.add(&Profile::tables, rows_, time);
        break;
      case SpanKind::Results:
        times_.add(&Profile::results, head_rows_, time);
        break;
      case SpanKind::HostAttention:
      case SpanKind::HostRows:
        break;  // take_host
    }
  }

  static void add_product(Group& group, bool qkv, const Time& time) {
    const auto join = [&](Time& to) {
      const double seconds = to.seconds + time.seconds;
      to.overlap = seconds > 0 ? (to.overlap * to.seconds + time.overlap * time.seconds) / seconds
                               : time.overlap;
      to.seconds = seconds;
    };
    join(group.all);
    if (qkv) {
      join(group.qkv);
    }
  }

  // A layer is done.
  void add_products() {
    for (Group& group : groups_) {
      // A single row between large prompts takes what their heat and their stores leave it.
      if (group.all.seconds > 0 && !(prompts_ && group.rows <= 1)) {
        times_.add(&Profile::qkv, group.rows, std::exchange(group.qkv, {}));
        times_.add(&Profile::forward, group.rows, std::exchange(group.all, {}));
      }
    }
  }

  ProfileTimes& times_;
  const bool busy_work_, beside_link_, absorbs_, prompts_;
  std::vector<Brought> brought_;
  std::vector<Group> groups_;
  double rows_ = 0, samples_ = 0, head_left_ = 0, head_rows_ = 0;
  std::map<std::uint32_t, std::int64_t> loaded_;
  std::int64_t computed_ = INT64_MAX;  // the end of the last span of work; none: no wait is known
  std::array<Busy, 4> busy_;           // by stream
};

void ProfileTimes::add(ProfileWork work, const messages::IterationT& tables,
                       const std::vector<StageSpan>& spans) {
  check(!spans.empty(), "a traced iteration has spans");
  Reader(*this, work, tables, spans).read(spans);
}

void ProfileTimes::add_between(Seconds rest) { between_.push_back(rest.n); }

void ProfileTimes::add(Line Profile::*line, double n, Time time) {
  if (n > 0) {
    samples(line).by_n[n].push_back(time);
  }
}

ProfileTimes::Samples& ProfileTimes::samples(Line Profile::*line) {
  const auto lines = profile_lines();
  const auto found = std::ranges::find(lines, line, &ProfileLine::line);
  return lines_.at(static_cast<std::size_t>(found - lines.begin()));
}

// Together: times while others worked; all times if there are none of these.
std::vector<Point> ProfileTimes::medians(const Samples& samples, bool alone) {
  std::vector<Point> points;
  for (const auto& [n, times] : samples.by_n) {
    std::vector<double> chosen, all;
    for (const Time& time : times) {
      all.push_back(time.seconds);
      if (alone ? time.overlap <= kAlone : time.overlap >= kTogether) {
        chosen.push_back(time.seconds);
      }
    }
    if (chosen.empty() && !alone) {
      chosen = std::move(all);
    }
    if (!chosen.empty()) {
      points.push_back({n, {median(std::move(chosen))}});
    }
  }
  return points;
}

void ProfileTimes::fit(Profile& profile) const {
  profile.measured.clear();
  profile.load_beside_host = profile.load_act_beside_host = {};  // never of a smaller scale
  for (std::size_t i = 0; i < profile_lines().size(); ++i) {
    const ProfileLine& line = profile_lines()[i];
    MeasuredLine measured{.name = line.name,
                          .points = medians(lines_[i], false),
                          .alone = medians(lines_[i], true),
                          .alone_line = {},
                          .remeasured = lines_[i].remeasured};
    if (measured.points.empty()) {
      continue;
    }
    if (line.line == &Profile::absorb) {
      for (std::vector<Point>* points : {&measured.points, &measured.alone}) {
        for (Point& point : *points) {
          const Seconds rows = profile.absorb_rows(absorbing_rows_);
          point.time = {std::max(point.time.n - rows.n, kShortestPart * point.time.n)};
        }
      }
    }
    profile.*line.line = fit_line(measured.points);
    (profile.*line.line).points = rising(measured.points);
    if (measured.alone.size() > 1) {
      measured.alone_line = fit_line(measured.alone);
    }
    profile.measured.push_back(std::move(measured));
  }
  complete(profile);
  if (!between_.empty()) {
    profile.between = {median(between_)};
  }
  if (!event_latencies_.empty()) {
    profile.event_latency = {median(event_latencies_)};
  }
}

ProfileTimes::Outliers ProfileTimes::outliers() const {
  Outliers outliers;
  for (std::size_t i = 0; i < profile_lines().size(); ++i) {
    const std::vector<Point> points = medians(lines_[i], false);
    if (points.empty()) {
      continue;
    }
    for (const std::size_t far : far_points(points)) {
      outliers.emplace_back(profile_lines()[i].line, points[far].n);
    }
  }
  return outliers;
}

void ProfileTimes::forget(const Outliers& outliers) {
  for (const auto& [line, n] : outliers) {
    Samples& of = samples(line);
    of.by_n.erase(n);
    ++of.remeasured;
  }
}

}  // namespace poise
