#include "planner/process/journal.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "common/files/json.h"
#include "common/files/regular_file.h"
#include "common/files/replace_file.h"
#include "common/order_log.h"
#include "common/trouble.h"

namespace poise {
namespace {

using nlohmann::json;

constexpr char kMagic[8] = {'P', 'O', 'I', 'S', 'E', 'J', 'N', 'L'};
constexpr std::uint32_t kJournalVersion = 7;

struct Head {
  char magic[8];
  std::uint32_t version;
  std::uint32_t crc;
  std::uint64_t bytes;
};
static_assert(sizeof(Head) == 24);

std::filesystem::path path_in(const std::filesystem::path& run_dir) { return run_dir / "journal"; }

// ---- one way and the other: lists, in the order of the fields

json to_json(const TokenLogprobs& value) {
  json top = json::array();
  for (const auto& [token, logprob] : value.top) {
    top.push_back(token);
    top.push_back(logprob);
  }
  return json::array({value.logprob, std::move(top)});
}

TokenLogprobs token_logprobs(const json& from) {
  TokenLogprobs value{.logprob = from.at(0).get<float>(), .top = {}};
  const json& top = from.at(1);
  for (std::size_t i = 0; i < top.size(); i += 2) {
    value.top.emplace_back(top.at(i).get<TokenId>(), top.at(i + 1).get<float>());
  }
  return value;
}

json to_json(const std::vector<TokenLogprobs>& values) {
  json all = json::array();
  for (const TokenLogprobs& value : values) {
    all.push_back(to_json(value));
  }
  return all;
}

std::vector<TokenLogprobs> all_token_logprobs(const json& from) {
  std::vector<TokenLogprobs> values;
  for (const json& value : from) {
    values.push_back(token_logprobs(value));
  }
  return values;
}

json to_json(const BlockRef& block) {
  return (std::uint64_t{block.number.n} << 4) | (static_cast<std::uint64_t>(block.kind) << 2) |
         static_cast<std::uint64_t>(block.place);
}

BlockRef block_ref(const json& from) {
  const auto bits = from.get<std::uint64_t>();
  return {.kind = (bits & 4) != 0 ? BlockKind::act : BlockKind::kv,
          .place = static_cast<Place>(bits & 3),
          .number = BlockId{static_cast<std::uint32_t>(bits >> 4)}};
}

json to_json(const Scheduler::Snapshot& begun) {
  json blocks = json::array();
  for (const BlockRef& block : begun.blocks) {
    blocks.push_back(to_json(block));
  }
  return json::array({begun.request.n, begun.answer, begun.prompt_values, begun.running,
                      begun.stored, begun.token_blocks, std::move(blocks), begun.lost});
}

Scheduler::Snapshot begun_request(const json& from) {
  Scheduler::Snapshot begun{.request = {from.at(0).get<std::uint32_t>()},
                            .answer = from.at(1).get<std::vector<TokenId>>(),
                            .prompt_values = from.at(2).get<std::int32_t>(),
                            .running = from.at(3).get<bool>(),
                            .stored = from.at(4).get<std::int32_t>(),
                            .token_blocks = from.at(5).get<std::int32_t>(),
                            .blocks = {},
                            .lost = from.at(7).get<std::vector<std::uint32_t>>()};
  for (const json& block : from.at(6)) {
    begun.blocks.push_back(block_ref(block));
  }
  return begun;
}

json to_json(const AnswerBook::Snapshot& begun) {
  return json::array(
      {begun.request.n, begun.prompt_ran, to_json(begun.prompt_values), to_json(begun.values)});
}

AnswerBook::Snapshot begun_answer(const json& from) {
  return {.request = {from.at(0).get<std::uint32_t>()},
          .prompt_ran = from.at(1).get<bool>(),
          .prompt_values = all_token_logprobs(from.at(2)),
          .values = all_token_logprobs(from.at(3))};
}

json to_json(const ExecutorTotals& totals) {
  return json::array({totals.layer_orders, totals.weights, totals.kv, totals.act, totals.stores,
                      totals.copy_in_busy_ns, totals.compute_busy_ns, totals.copy_out_busy_ns,
                      totals.compute_wait_ns});
}

ExecutorTotals executor_totals(const json& from) {
  return {.layer_orders = from.at(0),
          .weights = from.at(1),
          .kv = from.at(2),
          .act = from.at(3),
          .stores = from.at(4),
          .copy_in_busy_ns = from.at(5),
          .compute_busy_ns = from.at(6),
          .copy_out_busy_ns = from.at(7),
          .compute_wait_ns = from.at(8)};
}

json to_json(const Prediction::Figures& figures) {
  return json::array({figures.decoding, figures.decode_predicted.n, figures.decode_measured.n,
                      figures.predicted.n, figures.measured.n});
}

Prediction::Figures prediction_figures(const json& from) {
  return {.decoding = from.at(0),
          .decode_predicted = {from.at(1).get<double>()},
          .decode_measured = {from.at(2).get<double>()},
          .predicted = {from.at(3).get<double>()},
          .measured = {from.at(4).get<double>()}};
}

json to_json(const CulpritSearch::State& search) {
  json suspects = json::array();
  for (const RequestPart& suspect : search.suspects) {
    suspects.push_back({suspect.request.n, suspect.end});
  }
  return json::array({search.searching, std::move(suspects)});
}

CulpritSearch::State culprit_search(const json& from) {
  CulpritSearch::State search{.suspects = {}, .searching = from.at(0)};
  for (const json& suspect : from.at(1)) {
    search.suspects.push_back(
        {{suspect.at(0).get<std::uint32_t>()}, suspect.at(1).get<std::int32_t>()});
  }
  return search;
}

json to_json(const Journal& journal) {
  json requests = json::array(), answers = json::array();
  for (const auto& request : journal.requests) {
    requests.push_back(to_json(request));
  }
  for (const auto& answer : journal.answers) {
    answers.push_back(to_json(answer));
  }
  return {{"run_id", journal.run_id},
          {"build", journal.build},
          {"model", journal.model},
          {"input", journal.input},
          {"pool_epoch", journal.pool_epoch},
          {"region_bytes", journal.partition.region_bytes},
          {"act_blocks", journal.partition.act_blocks},
          {"kv_blocks", journal.partition.kv_blocks},
          {"gpu_act_blocks", journal.gpu_act_blocks},
          {"gpu_kv_blocks", journal.gpu_kv_blocks},
          {"executor", journal.executor},
          {"iteration", journal.iteration},
          {"prompt_tokens", journal.prompt_tokens},
          {"generated_tokens", journal.generated_tokens},
          {"preemptions", journal.preemptions},
          {"shared_tokens", journal.shared_tokens},
          {"elapsed", journal.elapsed},
          {"totals", to_json(journal.totals)},
          {"predicted", to_json(journal.predicted)},
          {"requests", std::move(requests)},
          {"answers", std::move(answers)},
          {"search", to_json(journal.search)}};
}

Journal journal_of(const json& from) {
  Journal journal{.run_id = from.at("run_id"),
                  .build = from.at("build"),
                  .model = from.at("model"),
                  .input = from.at("input"),
                  .pool_epoch = from.at("pool_epoch"),
                  .partition = {.region_bytes = from.at("region_bytes"),
                                .act_blocks = from.at("act_blocks"),
                                .kv_blocks = from.at("kv_blocks")},
                  .gpu_act_blocks = from.at("gpu_act_blocks"),
                  .gpu_kv_blocks = from.at("gpu_kv_blocks"),
                  .executor = from.at("executor"),
                  .iteration = from.at("iteration"),
                  .prompt_tokens = from.at("prompt_tokens"),
                  .generated_tokens = from.at("generated_tokens"),
                  .preemptions = from.at("preemptions"),
                  .shared_tokens = from.at("shared_tokens"),
                  .elapsed = from.at("elapsed"),
                  .totals = executor_totals(from.at("totals")),
                  .predicted = prediction_figures(from.at("predicted")),
                  .requests = {},
                  .answers = {},
                  .search = culprit_search(from.at("search"))};
  for (const json& request : from.at("requests")) {
    journal.requests.push_back(begun_request(request));
  }
  for (const json& answer : from.at("answers")) {
    journal.answers.push_back(begun_answer(answer));
  }
  return journal;
}

// ---- the file

}  // namespace

void write_journal(const std::filesystem::path& run_dir, const Journal& journal) {
  const std::vector<std::uint8_t> payload = json::to_cbor(to_json(journal));
  const auto bytes = std::as_bytes(std::span(payload));
  Head head{.magic = {}, .version = kJournalVersion, .crc = crc32c(bytes), .bytes = payload.size()};
  std::memcpy(head.magic, kMagic, sizeof kMagic);
  std::string whole(reinterpret_cast<const char*>(&head), sizeof head);
  whole.append(payload.begin(), payload.end());
  replace_file(path_in(run_dir), whole);
}

bool journal_exists(const std::filesystem::path& run_dir) {
  return std::filesystem::exists(path_in(run_dir));
}

Journal take_journal(const std::filesystem::path& run_dir) {
  const std::filesystem::path path = path_in(run_dir);
  const RegularFile file(path);
  std::filesystem::remove(path);
  Head head{};
  const auto size = static_cast<std::uint64_t>(file.size().n);
  if (size < sizeof head) {
    fail("{} is torn: {} bytes are no journal", path.string(), size);
  }
  file.read_exactly(0, std::as_writable_bytes(std::span(&head, 1)));
  if (std::memcmp(head.magic, kMagic, sizeof kMagic) != 0 || head.version != kJournalVersion) {
    fail("{} is no journal of this version of poise", path.string());
  }
  if (head.bytes != size - sizeof head) {
    fail("{} is torn: it holds {} bytes of {}", path.string(), size - sizeof head, head.bytes);
  }
  std::vector<std::byte> payload(head.bytes);
  file.read_exactly(sizeof head, payload);
  if (crc32c(payload) != head.crc) {
    fail("{} is damaged: its checksum is another", path.string());
  }
  try {
    return journal_of(json::from_cbor(payload));
  } catch (const json::exception& problem) {
    fail("{} is damaged: {}", path.string(), shown(problem.what(), 200));
  }
}

void lose_blocks(Journal& journal, Lost lost) {
  for (Scheduler::Snapshot& begun : journal.requests) {
    if (lost == Lost::everything) {
      begun.blocks.clear();
      begun.lost.clear();
      begun.stored = 0;
      continue;
    }
    for (std::uint32_t i = 0; i < begun.blocks.size(); ++i) {
      if (begun.blocks[i].place == Place::gpu && !std::ranges::binary_search(begun.lost, i)) {
        begun.lost.insert(std::ranges::upper_bound(begun.lost, i), i);
      }
    }
  }
}

void check_same_work(const Journal& journal, const Journal& now) {
  const auto same = [](const char* what, const auto& then, const auto& now_) {
    if (then != now_) {
      fail("the journal is of another {}: {} instead of {}", what, then, now_);
    }
  };
  same("run", journal.run_id, now.run_id);
  same("build", journal.build, now.build);
  same("model", journal.model, now.model);
  same("input", journal.input, now.input);
  same("block pool", journal.pool_epoch, now.pool_epoch);
  same("partition of the pool (region)", journal.partition.region_bytes,
       now.partition.region_bytes);
  same("partition of the pool (ACT)", journal.partition.act_blocks, now.partition.act_blocks);
  same("partition of the pool (KV)", journal.partition.kv_blocks, now.partition.kv_blocks);
}

}  // namespace poise
