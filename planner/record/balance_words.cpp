#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "common/words.h"
#include "planner/record/balance.h"

// What to say about a run's balance. A side is "busy" if it works nearly all the time and so cannot do
// more.

namespace poise {
namespace {

constexpr double kBusy = 0.85;
constexpr double kMuch = 0.15;              // of the time: worth a word
constexpr std::int64_t kFewIterations = 4;  // fewer are too few to judge by
constexpr Seconds kShort{0.05};

bool is_much(const BalanceSums& sums) {  // to judge by
  return sums.iterations >= kFewIterations && sums.wall.n >= kShort.n;
}

// Shares of wall time.
struct Shares {
  explicit Shares(const BalanceSums& sums)
      : link(of(std::max(sums.pcie, sums.back), sums)),
        back(sums.back.n > sums.pcie.n),
        compute(of(sums.compute, sums)),
        for_weights(of(sums.for_weights, sums)),
        for_blocks(of(sums.for_blocks, sums)),
        for_rows(of(sums.for_rows, sums)),
        for_host(of(sums.for_host, sums)),
        for_buffers(of(sums.for_buffers, sums)),
        host(of(sums.host, sums)) {
    no_orders = std::clamp(1 - compute - for_weights - for_blocks - for_rows - for_host, 0.0, 1.0);
  }
  static double of(Seconds part, const BalanceSums& sums) { return part.n / sums.wall.n; }

  double link;
  bool back;  // stores are what the link is busy with
  double compute, for_weights, for_blocks, for_rows, for_host, for_buffers;
  double host;
  double no_orders;  // computation had none to work on
};

std::string percent(double share) { return fmt::format("{:.0f} %", 100 * std::min(share, 1.0)); }

const char* advice_for_weights(MoreRequests more) {
  switch (more) {
    case MoreRequests::none:
      return "there were no more requests to share them; more of the GPU's memory would keep them.";
    case MoreRequests::slower:
      return "this few requests at a time are done sooner than more, whose context would leave "
             "less "
             "of the GPU's memory for weights; more memory would keep them.";
    default:
      return "more requests at a time (--max-num-seqs, more host memory) would share them, or more "
             "of the GPU's memory keep them.";
  }
}

const char* advice_for_gaps(MoreRequests more) {
  switch (more) {
    case MoreRequests::none:
      return "There were no more requests to make that share smaller.";
    case MoreRequests::slower:
      return "More requests at a time would make that share smaller, and the whole longer.";
    default:
      return "More requests at a time would make that share smaller.";
  }
}

// Whether more ACT would help a link that is always busy, and why.
std::string advice_for_link(const BalanceSums& sums, const Shares& shares,
                            const BalanceFacts& facts) {
  if (shares.back) {
    return "It is busy with new rows on their way to the host: more ACT would make them smaller.";
  }
  const double bytes =
      static_cast<double>(std::max<std::uint64_t>(sums.weights + sums.kv + sums.act, 1));
  const double weights = static_cast<double>(sums.weights) / bytes;
  const double kv = static_cast<double>(sums.kv) / bytes;
  if (weights >= 0.5) {
    return fmt::format("{} of what it carried were weights: {}", percent(weights),
                       advice_for_weights(facts.more_requests));
  }
  if (shares.compute >= kBusy) {
    return "Both sides are busy: neither more ACT nor less would help.";
  }
  if (kv < 0.05) {
    return fmt::format("More ACT would not help: {}",
                       sums.act > 0
                           ? "all context that crosses is ACT already; ACT blocks or layers "
                             "kept on the GPU would, or a faster link."
                           : "no context crosses.");
  }
  if (!facts.act_is_smaller) {
    return "More ACT would not help: with this model an ACT block is no smaller than a KV block.";
  }
  return fmt::format(
      "More ACT would help: {} of what it carried were KV blocks, and the {} has time "
      "to make them from ACT.",
      percent(kv), facts.device);
}

std::string advice_for_compute(const BalanceSums& sums, const Shares& shares) {
  if (shares.link >= kBusy) {
    return "Both sides are busy: neither more ACT nor less would help.";
  }
  if (sums.act_blocks > 0) {
    return "More ACT would not help, less would: KV blocks need no regeneration, and the link "
           "has "
           "time to bring them.";
  }
  return "More ACT would not help: computation is the limit, and no part of it is for ACT blocks.";
}

std::string advice_for_host(const BalanceSums& sums, const Shares& shares,
                            const BalanceFacts& facts) {
  const double bytes =
      static_cast<double>(std::max<std::uint64_t>(sums.weights + sums.kv + sums.act, 1));
  if (shares.link >= kBusy || shares.compute >= kBusy) {
    return "Host cores and another side are busy: attention elsewhere would not help.";
  }
  return fmt::format(
      "The host cores are the limit, and the link has time to bring blocks: fewer requests "
      "attended there would help (another policy){}.",
      static_cast<double>(sums.weights) >= 0.5 * bytes
          ? ""
          : fmt::format(", or more threads (--host-threads), while the {} is not the limit",
                        facts.device));
}

std::string advice_for_neither(const BalanceSums& sums, const Shares& shares,
                               const BalanceFacts& facts) {
  if (shares.no_orders >= kMuch) {
    return fmt::format(
        "{} of the time there was no order to work on: the planner waited for results or "
        "planned the next iteration. {}",
        percent(shares.no_orders), advice_for_gaps(facts.more_requests));
  }
  if (sums.mini_batches * 2 <= sums.iterations * 3) {
    const bool more = facts.more_requests == MoreRequests::unknown ||
                      facts.more_requests == MoreRequests::possible;
    return fmt::format(
        "Most iterations had a single mini-batch, whose blocks cannot load while it computes: "
        "{}smaller mini-batches (--mini-batch-tokens){} would overlap them.",
        more ? "more requests, or " : "", more ? "," : "");
  }
  const std::pair<double, const char*> causes[] = {
      {shares.for_blocks, "computation waited for blocks"},
      {shares.for_weights, "computation waited for weights"},
      {shares.for_rows, "computation waited for new rows to leave"},
      {shares.for_host, "computation waited for host cores"}};
  const auto& [share, what] = *std::ranges::max_element(causes);
  return fmt::format(
      "They took turns: {} of the time {}, {} the link waited for buffers{}.", percent(share), what,
      percent(shares.for_buffers),
      sums.mean_f_b() > 1.5
          ? fmt::format("; mini-batches are out of balance (F_b {:.1f})", sums.mean_f_b())
          : std::string());
}

// Of the iterations that were reported on.
std::string words_of_reports(const Balance& balance, const BalanceFacts& facts) {
  const BalanceSums& all = is_much(balance.settled()) ? balance.settled() : balance.all();
  if (!is_much(all)) {
    return fmt::format("{} iteration{} in {:.2f} s are too little to judge the balance by.",
                       all.iterations, all.iterations == 1 ? "" : "s", all.wall.n);
  }
  const bool generating = is_much(balance.decode());
  const BalanceSums& sums = generating ? balance.decode() : all;
  const Shares shares(sums);
  std::string text =
      fmt::format("{} link was busy {} of the time, the {} {}{}. ",
                  generating ? "While generating, the" : "The", percent(shares.link), facts.device,
                  percent(shares.compute),
                  sums.host.n > 0 ? fmt::format(", the host cores {}", percent(shares.host)) : "");
  if (shares.host >= kBusy && shares.host >= std::max(shares.link, shares.compute)) {
    return text + advice_for_host(sums, shares, facts);
  }
  if (shares.link >= kBusy && shares.link >= shares.compute) {
    return text + advice_for_link(sums, shares, facts);
  }
  if (shares.compute >= kBusy) {
    return text + advice_for_compute(sums, shares);
  }
  return text + advice_for_neither(sums, shares, facts);
}

}  // namespace

std::string words(const Balance& balance, const BalanceFacts& facts) {
  if (facts.without_reports == 0) {
    return words_of_reports(balance, facts);
  }
  const bool all = balance.all().iterations == 0;
  return fmt::format(
      "{}{} {} no reports (--orders-log tables): {}.",
      all ? "" : words_of_reports(balance, facts) + " ",
      counted(facts.without_reports, "iteration"), facts.without_reports == 1 ? "has" : "have",
      all ? fmt::format("how busy link and {} were is not known", facts.device)
          : std::string(facts.without_reports == 1 ? "it is left out" : "they are left out"));
}

}  // namespace poise
