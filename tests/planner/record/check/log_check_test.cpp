// Orders of the real scheduler, policies, tables and weight stream pass; with any one of them changed
// they do not, and the complaint names what was changed.

#include "planner/record/check/log_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>

#include "common/weight_layout.h"
#include "planner/schedule/iteration.h"
#include "planner/schedule/schedule.h"
#include "planner/schedule/weight_stream.h"

namespace poise {
namespace {

using testing::HasSubstr;
using Messages = std::vector<std::unique_ptr<messages::MessageT>>;

constexpr std::int32_t kLayers = 5;
constexpr Allocation kHost{.act_blocks = 6, .kv_blocks = 9, .gpu_act_blocks = 3};

ModelShape shape() {
  return {.num_hidden_layers = kLayers,
          .hidden_size = 64,
          .ffn_dim = 256,
          .num_attention_heads = 4,
          .num_key_value_heads = 4,
          .head_dim = 16,
          .vocab_size = 100,
          .max_position_embeddings = 128,
          .word_embed_proj_dim = 64};
}

// What a planner and its executor would have logged: twelve requests that do not all fit at once.
class Recorded {
 public:
  explicit Recorded(const char* policy_name = "hybrid", std::uint64_t pool = 1,
                    std::uint32_t seed = 1, std::int32_t window = 0, bool absorption = false,
                    bool sharing = false)
      : layout_(weight_layout(shape(), DType::float16)),
        random_(seed),
        window_(window),
        absorption_(absorption) {
    Allocation blocks = kHost;
    blocks.host_share = std::string_view(policy_name) == "host-kv" ? 0.7 : 0;
    for (std::uint32_t id = 1; id <= 12; ++id) {
      Request request;
      request.id = {id};
      std::vector<TokenId> prompt(5 + random_() % 30);
      std::ranges::generate(prompt, [&] { return static_cast<TokenId>(random_() % 100); });
      if (sharing) {  // prompts of a block and more have that in common, some of them two
        prompt.resize(prompt.size() + 8, 5);
        std::fill_n(prompt.begin(), std::min<std::size_t>(prompt.size(), id % 2 == 0 ? 16 : 32), 3);
      }
      request.prompt = std::move(prompt);
      request.sampling.max_tokens = static_cast<std::int32_t>(20 + random_() % 60);
      requests_.push_back(std::move(request));
    }
    begin();
    const auto policy = make_policy(policy_name, {});
    Scheduler scheduler(*policy, blocks,
                        {.max_num_seqs = 8,
                         .prefill_rows = 64,
                         .sequence_rows = 38,
                         .kept = {.window = window},
                         .share_prefixes = sharing});
    for (const Request& request : requests_) {
      scheduler.add(request);
    }
    OrderTables tables(kHost, window > 0 ? LayerWindows{window} : LayerWindows(), absorption);
    WeightStream weights(layout_, {.resident_layers = 1});
    const PackLimits limits{
        .act_slots = 24, .kv_slots = 24, .tokens = 160, .rows = 40, .sequences = 4};
    for (std::uint64_t number = 1; !scheduler.idle(); ++number) {
      const auto parts = scheduler.next();
      auto iteration = plan_iteration({.policy = *policy, .host = kHost, .limits = limits}, parts,
                                      tables, {.number = number, .pool_epoch = pool});
      const auto count = static_cast<std::uint32_t>(iteration.mini_batches.size());
      add(std::move(iteration));
      for (std::uint32_t stage = 0; stage < kLayers + 2; ++stage) {
        messages::LayerOrderT order;
        order.iteration = number;
        order.stage = stage;
        for (std::uint32_t i = 0; i < count; ++i) {
          order.mini_batches.push_back(i);
        }
        order.fetch = weights.next(stage, count, scheduler.last_iteration());
        add(std::move(order));
        messages::LayerDoneT done;
        done.iteration = number;
        add(std::move(done));
      }
      complete(scheduler, parts, number);
    }
    preemptions = scheduler.preemptions();
    shared_tokens = scheduler.shared_tokens();
  }

  LogCheckReport check() const {
    LogCheck check(kLayers, layout_.layer.pieces.size(), window_);
    check_into(check);
    return check.report();
  }
  // Of a log that has only the orders from iteration `first` on; those of single layers only if it is full.
  LogCheckReport check_from(std::uint64_t first, LogKeeps keeps = LogKeeps::full) const {
    LogCheck check(kLayers, layout_.layer.pieces.size());
    check.begin_in_the_middle();
    check_into(check, first, keeps);
    return check.report();
  }
  void check_into(LogCheck& check, std::uint64_t first = 0, LogKeeps keeps = LogKeeps::full) const {
    std::uint64_t iteration = first == 0 ? 1 : 0;
    for (const auto& message : log) {
      const auto* tables = message->body.AsIteration();
      iteration = tables != nullptr ? tables->iteration : iteration;
      if ((iteration > 0 && iteration < first) || !is_kept(message->body.type, keeps)) {
        continue;
      }
      flatbuffers::FlatBufferBuilder builder;
      messages::FinishMessageBuffer(builder, messages::Message::Pack(builder, message.get()));
      check.take(*messages::GetMessage(builder.GetBufferPointer()), keeps);
    }
  }

  messages::IterationT& iteration(std::uint64_t number) {
    for (const auto& message : log) {
      auto* iteration = message->body.AsIteration();
      if (iteration != nullptr && iteration->iteration == number) {
        return *iteration;
      }
    }
    throw std::out_of_range("no such iteration");
  }
  messages::LayerOrderT& order(std::uint64_t iteration, std::uint32_t stage) {
    for (const auto& message : log) {
      auto* order = message->body.AsLayerOrder();
      if (order != nullptr && order->iteration == iteration && order->stage == stage) {
        return *order;
      }
    }
    throw std::out_of_range("no such order");
  }
  // The first mini-batch from `iteration` on of which that holds.
  messages::MiniBatchT& batch(std::uint64_t from,
                              const std::function<bool(const messages::MiniBatchT&)>& wanted) {
    for (std::uint64_t number = from;; ++number) {
      for (auto& batch : iteration(number).mini_batches) {
        if (wanted(*batch)) {
          return *batch;
        }
      }
    }
  }
  std::size_t pieces() const { return layout_.layer.pieces.size(); }

  Messages log;
  std::int64_t preemptions = 0, shared_tokens = 0;

 private:
  template <typename Table>
  void add(Table&& table) {
    auto message = std::make_unique<messages::MessageT>();
    message->run_id = "run";
    message->body.Set(std::forward<Table>(table));
    log.push_back(std::move(message));
  }
  void begin() {
    messages::PoolGrantT grant;
    grant.granted = true;
    grant.act_blocks = kHost.act_blocks;
    grant.kv_blocks = kHost.kv_blocks;
    add(std::move(grant));
    messages::ConfigureT configure;
    configure.resident_layers = 1;
    configure.max_rows = 64 + 8 * 38;
    configure.max_mini_batch_rows = 40;
    configure.max_sequences = 4;
    configure.act_slots = configure.kv_slots = 24;
    configure.max_context = 128;
    configure.gpu_act_blocks = kHost.gpu_act_blocks;
    configure.host_attention = true;
    configure.absorption = absorption_;
    add(std::move(configure));
    messages::ReadyT ready;
    ready.credits = 2;
    add(std::move(ready));
  }
  void complete(Scheduler& scheduler, std::span<const ScheduledChunk> parts, std::uint64_t number) {
    messages::IterationDoneT done;
    done.iteration = number;
    std::vector<Outcome> outcomes;
    for (const ScheduledChunk& part : parts) {
      if (!part.complete()) {
        continue;
      }
      const Request& request = *part.request->request;
      auto result = std::make_unique<messages::SampleResultT>();
      result->request = request.id.n;
      result->token = static_cast<TokenId>((part.request->known() * 7 + request.id.n) % 100);
      const bool ends = part.request->answered() + 1 >= request.sampling.max_tokens;
      outcomes.push_back({request.id, ends ? std::nullopt : std::optional(result->token)});
      done.results.push_back(std::move(result));
    }
    scheduler.complete(outcomes);
    add(std::move(done));
  }

  WeightLayout layout_;
  std::mt19937 random_;
  std::int32_t window_;
  const bool absorption_;
  std::vector<Request> requests_;
};

TEST(LogCheck, OrdersOfEveryPolicyHold) {
  for (const PolicyEntry& policy : policies()) {
    for (std::uint32_t seed = 1; seed <= 5; ++seed) {
      const Recorded recorded(policy.name.data(), 1, seed);
      const LogCheckReport report = recorded.check();
      EXPECT_EQ(report.violations, 0u) << policy.name << " seed " << seed << '\n'
                                       << to_text(report);
      EXPECT_GT(report.iterations, 20u);
      EXPECT_GT(report.rows_stored, 500u);
      EXPECT_GT(report.pieces_fetched, report.iterations * recorded.pieces());
    }
  }
  EXPECT_GT(Recorded("hybrid").preemptions, 0) << "too much room to test anything";
}

TEST(LogCheck, OrdersOfRequestsThatShareTheirBeginningHold) {
  for (const PolicyEntry& policy : policies()) {
    std::int64_t shared = 0;
    for (std::uint32_t seed = 1; seed <= 5; ++seed) {
      const Recorded recorded(policy.name.data(), 1, seed, 0, false, true);
      const LogCheckReport report = recorded.check();
      EXPECT_EQ(report.violations, 0u) << policy.name << " seed " << seed << '\n'
                                       << to_text(report);
      const LogCheckReport late = recorded.check_from(15);
      EXPECT_EQ(late.violations, 0u) << policy.name << " seed " << seed << '\n' << to_text(late);
      shared += recorded.shared_tokens;
    }
    const bool shares = policy.name != "host-kv" && policy.name != "token-recompute";
    EXPECT_TRUE(shares == (shared > 100)) << policy.name << " shares " << shared;
  }
}

TEST(LogCheck, TokensTakenOverThatTheBlocksDoNotHoldAreCaught) {
  const auto takes = [](const messages::MiniBatchT& one) { return !one.taken_over.empty(); };
  const auto complaint_of = [&](const std::function<void(messages::MiniBatchT&)>& change) {
    Recorded recorded("hybrid", 1, 2, 0, false, true);
    change(recorded.batch(1, takes));
    return to_text(recorded.check());
  };
  EXPECT_THAT(complaint_of([](auto& batch) { batch.taken_over[0]->tokens[7] = 99; }),
              HasSubstr("it holds position 7 of request"));
  EXPECT_THAT(complaint_of([](auto& batch) { batch.taken_over[0]->tokens.pop_back(); }),
              HasSubstr("tokens of context"));
  EXPECT_THAT(complaint_of([](auto& batch) { batch.taken_over.clear(); }),
              HasSubstr("tokens of context, 0 are known"));
  EXPECT_THAT(complaint_of([](auto& batch) { batch.taken_over[0]->sequence = 40; }),
              HasSubstr("tokens are taken over by sequence 40 of"));
  EXPECT_THAT(complaint_of([](auto& batch) { batch.taken_over[0]->position = 1; }),
              HasSubstr("are taken over from position 1"));
}

TEST(LogCheck, BlocksThatNoLayerSeesMayBeDroppedAndNoOthers) {
  for (const char* policy : {"hybrid", "kv-only", "act-only", "host-kv"}) {
    EXPECT_EQ(Recorded(policy, 1, 2, 20).check().violations, 0u) << policy;
  }
  const auto is_dropped = [](const messages::AttentionEntry& entry) {
    return entry.place() == messages::Place::Dropped;
  };
  Recorded recorded("kv-only", 1, 2, 20);
  messages::MiniBatchT& batch = recorded.batch(1, [&](const messages::MiniBatchT& one) {
    return std::ranges::any_of(one.entries, is_dropped);
  });
  const auto dropped = std::ranges::find_if(batch.entries, is_dropped);
  dropped[1] = *dropped;  // its rows see the next one
  EXPECT_THAT(to_text(recorded.check()), HasSubstr("is dropped, but position"));
  LogCheck without_window(kLayers, recorded.pieces());
  Recorded("kv-only", 1, 2, 20).check_into(without_window);
  EXPECT_THAT(to_text(without_window.report()), HasSubstr("not all layers have a window"));
}

TEST(LogCheck, ALogThatGoesOnWithTheSameBlocksOrWithOthersHolds) {
  for (const std::uint64_t pool : {1, 2}) {
    Recorded first("hybrid"), second("kv-only", pool);
    LogCheck check(kLayers, first.pieces());
    first.log.resize(first.log.size() /
                     2);  // it was killed; the next one begins with what it knows
    first.check_into(check);
    second.check_into(check);
    EXPECT_EQ(check.report().violations, 0u) << to_text(check.report());
    EXPECT_EQ(check.report().starts, 2u);
  }
}

TEST(LogCheck, OrdersOfALogThatLacksItsBeginningHold) {
  for (const PolicyEntry& policy : policies()) {
    const Recorded recorded(policy.name.data());
    const std::uint64_t iterations = recorded.check().iterations;
    for (std::uint64_t first = 2; first < iterations; first += 23) {
      for (const LogKeeps keeps : {LogKeeps::full, LogKeeps::tables}) {
        const LogCheckReport report = recorded.check_from(first, keeps);
        EXPECT_EQ(report.violations, 0u) << policy.name << " from " << first << '\n'
                                         << to_text(report);
        EXPECT_EQ(report.thin_iterations, keeps == LogKeeps::tables ? report.iterations : 0);
      }
    }
  }
  EXPECT_GT(Recorded("hybrid").check_from(20).trusted_rows, 0u);
}

// Changes one thing behind iteration 2 and returns the first complaint. A log that begins at iteration 2 shows it, too.
std::string complaint(const std::function<void(Recorded&)>& change, const char* policy = "hybrid",
                      std::uint64_t late = 2) {
  Recorded recorded(policy);
  change(recorded);
  const LogCheckReport report = recorded.check();
  EXPECT_GT(report.violations, 0u) << "nothing was noticed";
  if (late > 0) {
    EXPECT_GT(recorded.check_from(late).violations, 0u) << "nothing was noticed in a late log";
  }
  return report.first.empty() ? "" : report.first.front();
}

bool decodes(const messages::MiniBatchT& batch) {
  return batch.sequences.size() > 1 && batch.tokens.size() == batch.sequences.size();
}
bool on_host(const messages::MiniBatchT& batch) {
  return batch.entries.size() > 2 && batch.entries[0].where() == messages::Where::HostInPlace;
}

// What host cores do is followed like everything else.
TEST(LogCheck, HostCoresThatWouldReadOrWriteElsewhereAreCaught) {
  // A log that begins late takes on trust what stands in blocks; what is wrong with the tables it sees.
  const auto on_host_complaint = [](const std::function<void(messages::MiniBatchT&)>& change,
                                    std::uint64_t late = 2) {
    return complaint([&](Recorded& recorded) { change(recorded.batch(5, on_host)); }, "host-kv",
                     late);
  };
  EXPECT_THAT(
      on_host_complaint(
          [](messages::MiniBatchT& batch) { std::swap(batch.entries[0], batch.entries[1]); }, 0),
      testing::AnyOf(HasSubstr("it holds position"), HasSubstr("it belongs to token"),
                     HasSubstr("never written")));
  EXPECT_THAT(on_host_complaint([](messages::MiniBatchT& batch) { batch.stores.pop_back(); }),
              HasSubstr("is stored nowhere"));
  EXPECT_THAT(on_host_complaint([](messages::MiniBatchT& batch) {
                const messages::AttentionEntry& one = batch.entries[0];
                batch.entries[0] = {one.where(), one.kind(), messages::Place::Gpu,
                                    0,           0,          one.block()};
              }),
              HasSubstr("host cores attend"));
  EXPECT_THAT(on_host_complaint([](messages::MiniBatchT& batch) {
                const messages::AttentionEntry& one = batch.entries[0];
                batch.entries[0] = {
                    messages::Where::LoadedKv, one.kind(), one.place(), 0, 0, one.block()};
              }),
              HasSubstr("host cores attend"));
  EXPECT_THAT(on_host_complaint([](messages::MiniBatchT& batch) {
                batch.loads.emplace_back(messages::Kind::Kv, messages::Place::Host, kBlockTokens, 1,
                                         batch.entries[0].block(), 0);
              }),
              HasSubstr("it loads or regenerates"));
}

messages::AttentionEntry& absorbed_entry(messages::MiniBatchT& batch) {
  return *std::ranges::find(batch.entries, messages::Where::Activation,
                            &messages::AttentionEntry::where);
}
bool absorbs(const messages::MiniBatchT& batch) {
  return std::ranges::count(batch.entries, messages::Where::Activation,
                            &messages::AttentionEntry::where) > 1;
}

// What stands in the ACT buffer is followed as what is made of it is.
TEST(LogCheck, RowsThatAttendOtherActivationsThanTheirsAreCaught) {
  EXPECT_EQ(Recorded("hybrid", 1, 1, 0, true).check().violations, 0u);
  const auto absorbing_complaint = [](const std::function<void(Recorded&, messages::MiniBatchT&)>& change) {
    Recorded recorded("hybrid", 1, 1, 0, true);
    change(recorded, recorded.batch(5, absorbs));
    const LogCheckReport report = recorded.check();
    EXPECT_GT(report.violations, 0u);
    return report.first.empty() ? "" : report.first.front();
  };
  EXPECT_THAT(absorbing_complaint([](Recorded&, messages::MiniBatchT& batch) {
                std::erase_if(batch.loads, [](const messages::BlockRun& run) {
                  return run.kind() == messages::Kind::Act;
                });
              }),
              testing::AnyOf(HasSubstr("never written"), HasSubstr("nothing is loaded to")));
  EXPECT_THAT(absorbing_complaint([](Recorded&, messages::MiniBatchT& batch) {
                messages::AttentionEntry& one = absorbed_entry(batch);
                one = {one.where(), messages::Kind::Kv, one.place(), 0, one.slot(), one.block()};
              }),
              HasSubstr("cannot be read as Activation"));
  EXPECT_THAT(absorbing_complaint([](Recorded& recorded, messages::MiniBatchT&) {
                for (const auto& message : recorded.log) {
                  if (auto* configure = message->body.AsConfigure()) {
                    configure->absorption = false;
                  }
                }
              }),
              HasSubstr("which is not configured"));
  EXPECT_THAT(absorbing_complaint([](Recorded& recorded, messages::MiniBatchT&) {
                auto& prompt = recorded.batch(1, [](const messages::MiniBatchT& batch) {
                  return std::ranges::find(batch.entries, messages::Where::RegeneratedKv,
                                           &messages::AttentionEntry::where) != batch.entries.end();
                });
                auto& one = *std::ranges::find(prompt.entries, messages::Where::RegeneratedKv,
                                               &messages::AttentionEntry::where);
                one = {messages::Where::Activation, one.kind(), one.place(), 0,
                       one.slot(), one.block()};
              }),
              HasSubstr("new rows attend activations"));
}

// They may begin before the device has stored anything of the layer.
TEST(LogCheck, HostCoresThatWouldReadWhatTheDeviceStoresMeanwhileAreCaught) {
  Recorded recorded("host-kv");
  for (std::uint64_t number = 2;; ++number) {
    auto& batches = recorded.iteration(number).mini_batches;
    if (on_host(*batches.back()) && !on_host(*batches.front())) {
      messages::AttentionEntry& one = batches.back()->entries[0];
      one = {one.where(), one.kind(), one.place(), 0, 0, batches.front()->stores.back().block()};
      break;
    }
  }
  // Another sentence says that the block is of two requests.
  EXPECT_THAT(recorded.check().first,
              testing::Contains(HasSubstr("to which the device stores rows of mini-batch 0")));
}

TEST(LogCheck, HostCoresThatComeBeforeTheDeviceAreCaught) {
  EXPECT_THAT(complaint(
                  [](Recorded& recorded) {
                    for (std::uint64_t number = 5;; ++number) {
                      const auto& batches = recorded.iteration(number).mini_batches;
                      if (on_host(*batches.back()) && !on_host(*batches.front())) {
                        std::ranges::reverse(recorded.order(number, 2).mini_batches);
                        return;
                      }
                    }
                  },
                  "host-kv"),
              HasSubstr("which host cores attend"));
}

template <typename Records>
auto loads_of(const Records& loads, messages::Kind kind) {
  return std::ranges::count_if(loads, [&](const auto& run) { return run.kind() == kind; });
}

TEST(LogCheck, AStoreThatMovedIsCaught) {
  EXPECT_THAT(complaint([](Recorded& recorded) {
                auto& store = recorded.batch(5, decodes).stores[0];
                store = {store.kind(), store.place(),    store.token(), 1,
                         store.row(),  store.block() + 1};
              }),
              HasSubstr("it belongs to token"));
  EXPECT_THAT(complaint([](Recorded& recorded) {
                auto& store = recorded.batch(5, decodes).stores[0];
                const auto token = static_cast<std::uint16_t>((store.token() + 1) % kBlockTokens);
                store = {store.kind(), store.place(), token, 1, store.row(), store.block()};
              }),
              HasSubstr("is stored to token"));
  EXPECT_THAT(complaint([](Recorded& recorded) { recorded.batch(5, decodes).stores.pop_back(); }),
              HasSubstr("is stored nowhere"));
}

TEST(LogCheck, SlotsThatChangedPlacesAreCaught) {
  EXPECT_THAT(complaint([](Recorded& recorded) {
                auto& batch = recorded.batch(5, [](const messages::MiniBatchT& one) {
                  return loads_of(one.loads, messages::Kind::Kv) > 1;
                });
                messages::BlockRun *first = nullptr, *second = nullptr;
                for (messages::BlockRun& run : batch.loads) {
                  if (run.kind() == messages::Kind::Kv) {
                    (first == nullptr ? first : second) = &run;
                  }
                }
                const auto at = [](const messages::BlockRun& run, std::uint32_t slot) {
                  return messages::BlockRun(run.kind(), run.place(), run.tail_tokens(), run.count(),
                                            run.first_block(), slot);
                };
                const std::uint32_t one = first->first_slot(), two = second->first_slot();
                *first = at(*first, two);
                *second = at(*second, one);
              }),
              HasSubstr("slot"));
  EXPECT_THAT(complaint([](Recorded& recorded) {
                auto& entries = recorded.batch(5, decodes).entries;
                entries[1] = {entries[0].where(), entries[0].kind(), entries[0].place(), 0,
                              entries[0].slot(),  entries[1].block()};
              }),
              HasSubstr("slot"));
}

TEST(LogCheck, ALoadThatIsMissingIsCaught) {
  for (const messages::Kind kind : {messages::Kind::Kv, messages::Kind::Act}) {
    EXPECT_THAT(complaint([&](Recorded& recorded) {
                  auto& loads = recorded
                                    .batch(5,
                                           [&](const messages::MiniBatchT& one) {
                                             return loads_of(one.loads, kind) > 0;
                                           })
                                    .loads;
                  std::erase_if(loads, [&](const auto& run) { return run.kind() == kind; });
                }),
                testing::AnyOf(HasSubstr("never written"), HasSubstr("nothing is loaded to")));
  }
  EXPECT_THAT(complaint([](Recorded& recorded) {
                auto& batch = recorded.batch(
                    5, [](const messages::MiniBatchT& one) { return !one.regenerate.empty(); });
                batch.regenerate.clear();
              }),
              HasSubstr("never written"));
}

TEST(LogCheck, ABlockOfAnotherRequestOrNeverWrittenIsCaught) {
  EXPECT_THAT(complaint([](Recorded& recorded) {
                auto& batch = recorded.batch(5, decodes);
                const auto& own = batch.entries[batch.sequences[0].first_entry()];
                auto& other = batch.entries[batch.sequences[1].first_entry()];
                other = {own.where(), own.kind(), own.place(), 0, other.slot(), own.block()};
              }),
              HasSubstr("is loaded to"));
  EXPECT_THAT(complaint([](Recorded& recorded) {
                auto& batch = recorded.batch(5, decodes);
                const auto last = [&](std::size_t sequence) -> messages::AttentionEntry& {
                  const auto& of = batch.sequences[sequence];
                  return batch.entries[of.first_entry() + of.context() / kBlockTokens];
                };
                const messages::AttentionEntry own = last(0);
                last(1) = {own.where(), own.kind(), own.place(), 0, last(1).slot(), own.block()};
              }),
              HasSubstr("is of request"));
  // The second iteration's blocks never came to be.
  EXPECT_THAT(complaint(
                  [](Recorded& recorded) {
                    for (auto& batch : recorded.iteration(1).mini_batches) {
                      batch->stores.clear();
                    }
                  },
                  "hybrid", 0),
              HasSubstr("is stored nowhere"));
}

TEST(LogCheck, ATokenThatWasNotSampledIsCaught) {
  EXPECT_THAT(complaint([](Recorded& recorded) {
                auto& batch = recorded.batch(5, decodes);
                batch.tokens[1] = (batch.tokens[1] + 1) % 100;
              }),
              HasSubstr("it was"));
  EXPECT_THAT(complaint([](Recorded& recorded) {
                for (const auto& message : recorded.log) {
                  auto* done = message->body.AsIterationDone();
                  if (done != nullptr && done->iteration > 5 && !done->results.empty()) {
                    done->results.pop_back();
                    return;
                  }
                }
              }),
              HasSubstr("has none"));
}

TEST(LogCheck, ATokenThatItsMaskBarsIsCaught) {
  const auto with = [](std::uint32_t word) {
    Recorded recorded("hybrid");
    for (auto& sample : recorded.batch(5, decodes).samples) {
      sample->mask.assign(4, word);  // of the 100 tokens
    }
    return to_text(recorded.check());
  };
  EXPECT_EQ(with(~0u).find("bars"), std::string::npos);
  EXPECT_THAT(with(0), HasSubstr("which its mask bars"));
}

TEST(LogCheck, APromptOfAnotherLengthIsCaught) {
  const auto in_one = [](const std::function<void(std::vector<std::uint32_t>&)>& change) {
    return complaint(
        [&](Recorded& recorded) { change(recorded.batch(20, decodes).prompt_tokens); });
  };
  EXPECT_NE(in_one([](auto& prompts) { ++prompts.back(); }).find("it had"), std::string::npos);
  EXPECT_NE(in_one([](auto& prompts) { prompts.pop_back(); }).find("but the prompt's tokens of"),
            std::string::npos);
  for (const std::uint32_t wrong : {UINT32_MAX, 1U}) {  // one less, one more, from the beginning
    const std::string said = complaint(
        [&](Recorded& recorded) {
          for (const auto& message : recorded.log) {
            if (auto* iteration = message->body.AsIteration()) {
              for (auto& batch : iteration->mini_batches) {
                for (std::uint32_t& prompt : batch->prompt_tokens) {
                  prompt += wrong;
                }
              }
            }
          }
        },
        "hybrid", 0);
    EXPECT_NE(said.find("it is sampled behind token"), std::string::npos) << said;
  }
}

TEST(LogCheck, WeightsThatAreMissingOrComeTwiceAreCaught) {
  const auto with_fetches = [](Recorded& recorded) -> messages::LayerOrderT& {
    for (std::uint32_t stage = 1;; ++stage) {
      if (!recorded.order(3, stage).fetch.empty()) {
        return recorded.order(3, stage);
      }
    }
  };
  EXPECT_THAT(complaint([&](Recorded& recorded) { with_fetches(recorded).fetch.pop_back(); }),
              HasSubstr("pieces of weights"));
  EXPECT_THAT(complaint([&](Recorded& recorded) {
                auto& fetch = with_fetches(recorded).fetch;
                fetch.push_back(fetch.back());
              }),
              HasSubstr("twice"));
}

TEST(LogCheck, OrdersOutOfTurnAndBeyondTheirBoundsAreCaught) {
  EXPECT_THAT(complaint([](Recorded& recorded) {
                std::swap(recorded.order(3, 2).stage, recorded.order(3, 3).stage);
              }),
              HasSubstr("comes next"));
  EXPECT_THAT(complaint([](Recorded& recorded) { recorded.order(3, 2).mini_batches.pop_back(); }),
              HasSubstr("mini-batches of"));
  const auto configured = [](auto change) {
    return complaint([&](Recorded& recorded) { change(*recorded.log[1]->body.AsConfigure()); });
  };
  EXPECT_THAT(configured([](auto& configure) { configure.kv_slots = 2; }), HasSubstr("slot"));
  EXPECT_THAT(configured([](auto& configure) { configure.max_rows = 30; }), HasSubstr("rows, 30"));
  EXPECT_THAT(configured([](auto& configure) { configure.max_sequences = 1; }),
              HasSubstr("sequences, 1"));
  EXPECT_THAT(configured([](auto& configure) { configure.max_context = 40; }),
              HasSubstr("tokens, 40"));
  EXPECT_THAT(
      complaint([](Recorded& recorded) { recorded.log[0]->body.AsPoolGrant()->kv_blocks = 1; }),
      HasSubstr("KV block"));
  EXPECT_THAT(configured([](auto& configure) { configure.kv_format = messages::KvFormat::Int8; }),
              HasSubstr("KV blocks are auto, those of the buffers int8"));
  EXPECT_THAT(complaint([](Recorded& recorded) { recorded.log[2]->body.AsReady()->credits = 0; }),
              HasSubstr("credits"));
}

// A damaged or hostile log with sound CRCs (tests/fuzz/order_log_fuzz.cpp): the checks once read or took
// memory without bounds.
TEST(LogCheck, NumbersThatNoOrderHasAreToldAndNotFollowed) {
  constexpr std::uint32_t kMost = 0xffffffff;
  const auto complaints = [](const std::function<void(Recorded&)>& change) {
    Recorded recorded;
    change(recorded);
    return to_text(recorded.check());
  };
  const auto in_sequence = [&](auto change) {
    return complaints([&](Recorded& recorded) {
      auto& one = recorded.batch(5, decodes).sequences[0];
      std::uint32_t numbers[] = {one.context(), one.new_tokens(), one.first_row(),
                                 one.first_entry()};
      change(numbers);
      one = {one.request(), numbers[0], numbers[1], numbers[2], numbers[3]};
    });
  };
  EXPECT_THAT(in_sequence([](auto& numbers) { numbers[0] = kMost; }), HasSubstr("tokens"));
  EXPECT_THAT(in_sequence([](auto& numbers) { numbers[1] = kMost; }), HasSubstr("rows from"));
  EXPECT_THAT(in_sequence([](auto& numbers) { numbers[1] = 0; }), HasSubstr("rows from"));
  EXPECT_THAT(in_sequence([](auto& numbers) { numbers[2] = kMost; }), HasSubstr("rows from"));
  EXPECT_THAT(in_sequence([](auto& numbers) { numbers[3] = kMost; }), HasSubstr("entries of"));

  const auto in_store = [&](std::uint16_t token, std::uint32_t count, std::uint32_t row) {
    return complaints([&](Recorded& recorded) {
      auto& one = recorded.batch(5, decodes).stores[0];
      one = {one.kind(), one.place(), token, count, row, one.block()};
    });
  };
  EXPECT_THAT(in_store(0, kMost, 0), HasSubstr("stored to"));
  EXPECT_THAT(in_store(0, 1, kMost), HasSubstr("there is none"));
  EXPECT_THAT(in_store(0xffff, 1, 0), HasSubstr("is stored to token 65535"));

  const auto with_loads = [](const messages::MiniBatchT& batch) { return !batch.loads.empty(); };
  EXPECT_THAT(complaints([&](Recorded& recorded) {
                auto& run = recorded.batch(5, with_loads).loads[0];
                run = {run.kind(), run.place(), 16, kMost, run.first_block(), run.first_slot()};
              }),
              HasSubstr("is loaded to slot"));
  EXPECT_THAT(complaints([&](Recorded& recorded) {
                auto& batch = recorded.batch(
                    5, [](const messages::MiniBatchT& one) { return !one.regenerate.empty(); });
                batch.regenerate[0] = {batch.regenerate[0].first_slot(), kMost};
              }),
              HasSubstr("makes keys and values in slot"));
  const auto configured = [&](auto change) {
    return complaints([&](Recorded& recorded) { change(*recorded.log[1]->body.AsConfigure()); });
  };
  for (const std::int32_t limit : {-1, INT32_MAX}) {
    EXPECT_THAT(configured([&](auto& configure) { configure.kv_slots = limit; }),
                HasSubstr("is no limit"));
    EXPECT_THAT(configured([&](auto& configure) { configure.max_context = limit; }),
                HasSubstr("is no limit"));
  }
}

// The second sequence of the request begins its text anew, shorter than the first one's.
TEST(LogCheck, TwoSequencesOfOneRequestAfterARestartAreTold) {
  Recorded first("kv-only"), second("kv-only");
  LogCheck check(kLayers, first.pieces());
  first.check_into(check);
  auto& batch =
      second.batch(1, [](const messages::MiniBatchT& one) { return one.sequences.size() > 1; });
  for (messages::Sequence& sequence : batch.sequences) {
    sequence = {batch.sequences[0].request(), sequence.context(), sequence.new_tokens(),
                sequence.first_row(), sequence.first_entry()};
  }
  second.check_into(check);
  EXPECT_GT(check.report().violations, 0u);
}

}  // namespace
}  // namespace poise
