#include "planner/record/log_difference.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <deque>
#include <utility>

#include "common/channel.h"
#include "common/files/json.h"
#include "common/files/json_file.h"
#include "common/files/regular_file.h"
#include "common/order_log.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/record/log_digest.h"
#include "planner/record/log_extent.h"

namespace poise {
namespace {

constexpr std::size_t kMaxAhead = 64 << 20;

// Of a header: how the log was cut and who wrote it, not what was worked on.
constexpr std::array<std::string_view, 5> kOfOneLog{"run_id", "build", "segment", "keeps",
                                                    "carried"};

enum Direction { to_executor, from_executor };
constexpr std::array kDirections{to_executor, from_executor};

Direction direction_of(messages::Body kind) {
  const bool from = kind == messages::Body::Ready || kind == messages::Body::LayerDone ||
                    kind == messages::Body::IterationDone || kind == messages::Body::Rejected;
  return from ? from_executor : to_executor;
}

std::optional<std::uint64_t> iteration_of(const messages::Message& message) {
  switch (message.body_type()) {
    case messages::Body::Iteration:
      return message.body_as_Iteration()->iteration();
    case messages::Body::LayerOrder:
      return message.body_as_LayerOrder()->iteration();
    case messages::Body::LayerDone:
      return message.body_as_LayerDone()->iteration();
    case messages::Body::IterationDone:
      return message.body_as_IterationDone()->iteration();
    default:
      return std::nullopt;
  }
}

struct Waiting {
  LoggedMessage record;
  std::optional<std::uint64_t> after;  // the iteration that began last before it

  const messages::Message& message() const { return *messages::GetMessage(record.bytes.data()); }
};

// One of the two logs.
class LogSide {
 public:
  explicit LogSide(const std::filesystem::path& path)
      : path_(path), reader_(path), header_text_(reader_.header_json()) {
    const std::string what = fmt::format("the header of {}", path.string());
    header_ = parse_json(header_text_, what);
    layers_ = static_cast<std::int32_t>(
        JsonObject(header_, what).integer("layers", {.min = 1, .max = 1 << 20}).value_or(1));
  }

  const nlohmann::json& header() const { return header_; }
  const LogExtent& extent() const { return reader_.extent(); }
  std::string build() const { return header_.value("build", ""); }
  bool ended() const { return ended_; }
  std::size_t ahead() const { return ahead_; }
  std::deque<Waiting>& waiting(Direction direction) { return waiting_[direction]; }

  // Orders of layers and reports on them are passed over from now on.
  void leave_layers_out() { layers_left_out_ = true; }

  // Adds the next record to those that wait, unless the log has ended.
  void read() {
    while (!ended_) {
      auto record = reader_.next();
      if (!record) {
        ended_ = true;
        return;
      }
      const messages::Message* message = message_in(record->bytes);
      if (message == nullptr) {
        fail("record {} of order log {} is no message of this version of poise", record->number,
             path_.string());
      }
      if (layers_left_out_ && !is_kept(message->body_type(), LogKeeps::tables)) {
        continue;
      }
      if (const auto* iteration = message->body_as_Iteration()) {
        iteration_ = iteration->iteration();
      }
      ahead_ += record->bytes.size();
      waiting_[direction_of(message->body_type())].push_back(
          {.record = std::move(*record), .after = iteration_});
      return;
    }
  }

  // Passes over what stands before the tables of iteration `first`, or of a later one.
  void skip_to(std::uint64_t first) {
    while (!ended_ && (!iteration_ || *iteration_ < first)) {
      drop_all();
      read();
    }
    while (waiting_[to_executor].size() > 1) {
      pop(to_executor);
    }
    while (!waiting_[from_executor].empty()) {
      pop(from_executor);
    }
  }
  std::optional<std::uint64_t> iteration() const { return iteration_; }

  void pop(Direction direction) {
    ahead_ -= waiting_[direction].front().record.bytes.size();
    waiting_[direction].pop_front();
  }

  std::string where(const Waiting& one) const {
    const messages::Message& message = one.message();
    const auto number = iteration_of(message);
    const auto stage = [&](std::uint32_t number) { return stage_name(number, layers_); };
    switch (message.body_type()) {
      case messages::Body::Iteration:
        return fmt::format("iteration {}, tables", *number);
      case messages::Body::LayerOrder:
        return fmt::format("iteration {}, order of {}", *number,
                           stage(message.body_as_LayerOrder()->stage()));
      case messages::Body::LayerDone:
        return fmt::format("iteration {}, report on {}", *number,
                           stage(message.body_as_LayerDone()->stage()));
      case messages::Body::IterationDone:
        return fmt::format("iteration {}, results", *number);
      default:
        return fmt::format("{} {}", messages::EnumNameBody(message.body_type()),
                           one.after ? fmt::format("behind iteration {}", *one.after)
                                     : std::string("before the first iteration"));
    }
  }

 private:
  void drop_all() {
    for (const Direction direction : kDirections) {
      waiting_[direction].clear();
    }
    ahead_ = 0;
  }

  std::filesystem::path path_;
  OrderLogReader reader_;
  std::string header_text_;
  nlohmann::json header_;
  std::int32_t layers_ = 0;
  bool layers_left_out_ = false, ended_ = false;
  std::optional<std::uint64_t> iteration_;
  std::array<std::deque<Waiting>, 2> waiting_;
  std::size_t ahead_ = 0;
};

std::optional<LogDifference> header_difference(const LogSide& a, const LogSide& b,
                                               Compared compared) {
  for (const nlohmann::json* header : {&a.header(), &b.header()}) {
    for (const auto& [name, value] : header->items()) {
      const bool left_out = std::ranges::find(kOfOneLog, name) != kOfOneLog.end();
      const nlohmann::json in_a = a.header().value(name, nlohmann::json());
      const nlohmann::json in_b = b.header().value(name, nlohmann::json());
      if ((!left_out || compared == Compared::everything) && in_a != in_b) {
        return LogDifference{.where = "header",
                             .field = {.path = shown(name, 100),
                                       .a = shown(in_a.dump(), 300),
                                       .b = shown(in_b.dump(), 300)},
                             .iteration = {},
                             .record_a = {},
                             .record_b = {}};
      }
    }
  }
  return std::nullopt;
}

// "mini-batch 1, loads[4].first_slot" for "mini_batches[1].loads[4].first_slot", and whose result it is.
std::string readable(const std::string& path, const messages::Message& message) {
  constexpr std::string_view kBatch = "mini_batches[", kResult = "results[";
  const auto close = path.find(']');
  if (message.body_type() == messages::Body::Iteration && path.starts_with(kBatch)) {
    const std::string rest = path.substr(close + 1);
    return fmt::format("mini-batch {}{}", path.substr(kBatch.size(), close - kBatch.size()),
                       rest.empty() ? "" : ", " + rest.substr(1));
  }
  const auto* done = message.body_as_IterationDone();
  if (done != nullptr && path.starts_with(kResult)) {
    const auto i = std::stoul(path.substr(kResult.size(), close - kResult.size()));
    return fmt::format("{} (request {}){}", path.substr(0, close + 1),
                       done->results()->Get(static_cast<unsigned>(i))->request(),
                       path.substr(close + 1));
  }
  return path;
}

class LogComparison {
 public:
  LogComparison(const std::filesystem::path& a, const std::filesystem::path& b, Compared compared)
      : sides_{LogSide(a), LogSide(b)}, compared_(compared), messages_(compared) {}

  LogDiffReport run() {
    report_.extent_a = sides_[0].extent();
    report_.extent_b = sides_[1].extent();
    report_.build_a = sides_[0].build();
    report_.build_b = sides_[1].build();
    report_.difference = header_difference(sides_[0], sides_[1], compared_);
    if (report_.difference) {
      return report_;
    }
    begin_together();
    while (!report_.difference && !(sides_[0].ended() && sides_[1].ended())) {
      for (LogSide& side : sides_) {
        side.read();
      }
      compare_waiting();
    }
    return report_;
  }

 private:
  // Where a log lacks its beginning, both are read from the first iteration on that both have.
  void begin_together() {
    if (report_.extent_a.thin || report_.extent_b.thin) {
      for (LogSide& side : sides_) {
        side.leave_layers_out();
      }
    }
    if (!report_.extent_a.begins_late() && !report_.extent_b.begins_late()) {
      return;
    }
    for (LogSide& side : sides_) {
      side.skip_to(0);
    }
    for (int i = 0; i < 2; ++i) {  // the one may begin behind a gap of the other
      const std::uint64_t first =
          std::max(sides_[0].iteration().value_or(0), sides_[1].iteration().value_or(0));
      for (LogSide& side : sides_) {
        side.skip_to(first);
      }
    }
    if (sides_[0].iteration() != sides_[1].iteration() || !sides_[0].iteration() ||
        sides_[0].ended() || sides_[1].ended()) {
      fail("the two logs have no iteration in common: {}; {}", missing_text(report_.extent_a),
           missing_text(report_.extent_b));
    }
    report_.from = sides_[0].iteration();
    compare_waiting();
  }

  void compare_waiting() {
    for (const Direction direction : kDirections) {
      auto& a = sides_[0].waiting(direction);
      auto& b = sides_[1].waiting(direction);
      while (!report_.difference && !a.empty() && !b.empty()) {
        compare(a.front(), b.front());
        sides_[0].pop(direction);
        sides_[1].pop(direction);
      }
      if (!report_.difference && a.empty() != b.empty()) {
        find_what_is_missing(a.empty() ? 0 : 1, direction);
      }
    }
  }

  void compare(const Waiting& a, const Waiting& b) {
    const auto differs = messages_.first_difference(a.message(), b.message());
    if (!differs) {
      ++report_.records;
      report_.iterations += a.message().body_type() == messages::Body::IterationDone ? 1 : 0;
      return;
    }
    report_.difference = LogDifference{.where = sides_[0].where(a),
                                       .field = *differs,
                                       .iteration = iteration_of(a.message()),
                                       .record_a = a.record.number,
                                       .record_b = b.record.number};
    FieldDifference& field = report_.difference->field;
    if (a.message().body_type() != b.message().body_type()) {
      report_.difference->where = "other messages follow each other";
      field = {.path = "the next one", .a = sides_[0].where(a), .b = sides_[1].where(b)};
    } else {
      field.path = readable(field.path, a.message());
    }
  }

  // The log `lacking` has nothing in this direction while records of the other wait.
  void find_what_is_missing(int lacking, Direction direction) {
    LogSide& other = sides_[static_cast<std::size_t>(1 - lacking)];
    const LogSide& ended = sides_[static_cast<std::size_t>(lacking)];
    if (!ended.ended() && other.ahead() <= kMaxAhead) {
      return;  // it may follow
    }
    const Waiting& one = other.waiting(direction).front();
    std::string words[] = {other.where(one), other.where(one)};
    words[lacking] = ended.ended() ? "the log ends" : "nothing of the kind follows";
    report_.difference =
        LogDifference{.where = "one log goes on",
                      .field = {.path = "the next message", .a = words[0], .b = words[1]},
                      .iteration = iteration_of(one.message()),
                      .record_a = {},
                      .record_b = {}};
    (lacking == 0 ? report_.difference->record_b : report_.difference->record_a) =
        one.record.number;
  }

  std::array<LogSide, 2> sides_;
  Compared compared_;
  MessageComparison messages_;
  LogDiffReport report_;
};

std::string record_text(const std::filesystem::path& log, std::optional<std::uint64_t> record) {
  return record ? fmt::format("record {} of {}", *record, log.string())
                : fmt::format("none of {}", log.string());
}

}  // namespace

LogDiffReport diff_logs(const std::filesystem::path& a, const std::filesystem::path& b,
                        Compared compared) {
  return LogComparison(a, b, compared).run();
}

std::string to_text(const LogDiffReport& report, const LogDiffOptions& options) {
  std::string text;
  const std::string extent = fmt::format("{}, {}", counted(report.iterations, "iteration"),
                                         counted(report.records, "record"));
  if (const auto& difference = report.difference) {
    text = fmt::format("first difference: {}, {}: {} | {}\n", difference->where,
                       difference->field.path, difference->field.a, difference->field.b);
    if (difference->record_a || difference->record_b) {
      text +=
          fmt::format("{}, {}; equal before it: {}\n", record_text(options.a, difference->record_a),
                      record_text(options.b, difference->record_b), extent);
    }
  } else {
    text = fmt::format("no difference: {}\n", extent);
  }
  if (report.from) {
    text +=
        fmt::format("compared from iteration {} on, the first that both logs have\n", *report.from);
  }
  for (const auto& [log, extent_of] :
       {std::pair{&options.a, &report.extent_a}, std::pair{&options.b, &report.extent_b}}) {
    if (const std::string missing = missing_text(*extent_of); !missing.empty()) {
      text += fmt::format("{}: {}\n", log->string(), missing);
    }
  }
  if (report.build_a != report.build_b) {
    text += fmt::format("written by two builds: {} | {}\n", report.build_a, report.build_b);
  }
  if (options.compared == Compared::work) {
    text +=
        "not compared: names of runs and processes, clocks, measured times (--times compares "
        "them)\n";
  }
  return text;
}

std::string to_json(const LogDiffReport& report, const LogDiffOptions& options) {
  using Json = nlohmann::ordered_json;
  Json json{
      {"a", options.a.string()},
      {"b", options.b.string()},
      {"equal", !report.difference.has_value()},
      {"times_compared", options.compared == Compared::everything},
      {"equal_iterations", report.iterations},
      {"equal_records", report.records},
      {"from_iteration", report.from ? Json(*report.from) : Json()},
      {"missing", {{"a", missing_text(report.extent_a)}, {"b", missing_text(report.extent_b)}}},
      {"builds", {{"a", report.build_a}, {"b", report.build_b}}},
      {"difference", nullptr}};
  if (const auto& difference = report.difference) {
    const auto number = [](std::optional<std::uint64_t> one) { return one ? Json(*one) : Json(); };
    json["difference"] = {{"where", difference->where},
                          {"iteration", number(difference->iteration)},
                          {"field", difference->field.path},
                          {"a", difference->field.a},
                          {"b", difference->field.b},
                          {"record_a", number(difference->record_a)},
                          {"record_b", number(difference->record_b)}};
  }
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace poise
