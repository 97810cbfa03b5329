// An order log, through all of its readers: record by record, `inspect` as text and as JSON, `inspect --check`, and what
// replay keeps of it. They agree about the number of records; each line of JSON is a document. The mutator makes the
// records' CRCs and padding right again, so that the messages are looked at.

#include "common/files/json.h"
#include "common/order_log.h"
#include "planner/record/check/log_check.h"
#include "planner/record/inspect.h"
#include "planner/replay/replay_report.h"
#include "tests/fuzz/fuzzing.h"

namespace poise::fuzzing {
namespace {

constexpr std::size_t kFileHeader = 16, kRecordHeader = 24;

// What `inspect` prints; nothing if it is refused.
std::optional<std::string> inspected(const std::filesystem::path& log, bool json, bool brief) {
  char* text = nullptr;
  std::size_t size = 0;
  std::FILE* out = open_memstream(&text, &size);
  const auto refused = refusal([&] { inspect({.log = log, .json = json, .brief = brief}, out); });
  std::fclose(out);
  const std::string printed(text, size);
  std::free(text);
  return refused ? std::nullopt : std::optional(printed);
}

void check_inspect(const std::filesystem::path& log, bool json, bool brief) {
  const auto printed = inspected(log, json, brief);
  if (printed && !json) {
    for (std::size_t at = 0, end = 0; at < printed->size(); at = end + 1) {
      end = std::min(printed->find('\n', at), printed->size());
      expect(is_line(std::string_view(*printed).substr(at, end - at)),
             "a terminal can show what inspect prints");
    }
  }
  if (printed && json) {
    std::string_view rest = *printed;
    while (!rest.empty()) {
      const std::size_t end = rest.find('\n');
      expect(end != std::string_view::npos && nlohmann::json::accept(rest.substr(0, end)),
             "each line of inspect --json is a document");
      rest.remove_prefix(end + 1);
    }
  }
}

// The number of records in front of the end, damage or a torn tail; nothing if the file's header is refused.
std::optional<std::uint64_t> count_records(const std::filesystem::path& log) {
  std::optional<std::uint64_t> records;
  refusal([&] {
    OrderLogReader reader(log);
    records = 0;
    while (reader.next()) {
      ++*records;
    }
  });
  return records;
}

// One reader at a time: each takes its time.
void check_all_refuse(const std::filesystem::path& log, std::uint32_t reader) {
  const auto refused = refusal([&] {
    if (reader == 0) {
      LogDigest{log};
    } else if (reader == 1) {
      check_log(log);
    } else if (!inspected(log, reader == 2, false)) {
      fail("inspect refuses it");
    }
  });
  expect(refused.has_value(), "a header that one reader refuses is refused by all");
}

void check_replay(const std::filesystem::path& log, std::uint64_t records) {
  refusal([&] {
    LogDigest digest(log);
    ReplayReport report;
    report.begin(digest.facts().layers);
    digest.read({.iteration =
                     [&](const LoggedIteration& iteration) {
                       if (!iteration.done) {
                         report.skip();
                         return;
                       }
                       for (const LoggedLayer& layer : iteration.layers) {
                         report.take(layer.report);
                       }
                       report.take(iteration, iteration.answers, {1});
                     },
                 .configure = [](const messages::ConfigureT&, double) {},
                 .ready = [](const messages::ReadyT&, double) {},
                 .policy = [](const messages::PolicyInForceT&, double) {},
                 .pool = [](const messages::PoolGrantT&, const std::string&) {},
                 .weights = [](const messages::WeightsHeldT&) {}});
    expect(digest.records() == records, "readers agree about the records");
  });
}

void run_order_log(Input input) {
  const std::uint8_t* data = input.data();
  const std::size_t size = input.size();
  static const Folder folder;
  static const std::filesystem::path log = folder / "orders.log";
  folder.write("orders.log", text_of({data, size}));
  const std::uint32_t form = crc32c(std::as_bytes(std::span(data, size))) % 4;
  const std::optional<std::uint64_t> records = count_records(log);
  if (!records) {
    check_all_refuse(log, form);
    return;
  }
  check_replay(log, *records);
  check_inspect(log, form < 2, form == 0);  // one form at a time
  refusal([&] {
    const LogCheckReport report = check_log(log);
    for (const std::string& violation : report.first) {
      expect_sentence(violation);
    }
    expect((report.violations == 0) ==
               (to_text(report).find("every order holds") != std::string::npos),
           "a report says whether the orders hold");
  });
}

// Nearly always the records' CRCs are made right.
std::size_t mutate_order_log(std::uint8_t* data, std::size_t size, std::size_t most,
                             unsigned seed) {
  size = LLVMFuzzerMutate(data, size, most);
  if (seed % 16 == 0 || size < kFileHeader) {
    return size;
  }
  const auto bytes = std::as_writable_bytes(std::span(data, size));
  std::size_t at = kFileHeader + read_at<std::uint32_t>(data, 12);
  while (at < size && size - at >= kRecordHeader) {
    const std::size_t payload = read_at<std::uint32_t>(data, at);
    if (payload > size - at - kRecordHeader) {
      break;
    }
    write_at(data, at + 4, crc32c(bytes.subspan(at + kRecordHeader, payload)));
    write_at(data, at + 16, crc32c(bytes.subspan(at, 16)));
    const std::size_t end = at + kRecordHeader + payload;
    at += (kRecordHeader + payload + 7) / 8 * 8;
    std::fill(data + std::min(end, size), data + std::min(at, size), 0);
  }
  return size;
}

}  // namespace

const Target kOrderLogTarget{"order_log", run_order_log, mutate_order_log};

}  // namespace poise::fuzzing
