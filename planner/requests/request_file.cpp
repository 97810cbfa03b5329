#include "planner/requests/request_file.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <iterator>
#include <thread>
#include <unordered_map>
#include <utility>

#include "common/files/sha256.h"
#include "common/liveness/progress.h"
#include "common/trouble.h"
#include "planner/requests/chat_prompts.h"
#include "planner/requests/request_lines.h"

namespace poise {
namespace {

// What is held of the file at a time: enough lines to keep every thread busy, and one long line.
constexpr std::size_t kBatchLines = 2048;
constexpr std::size_t kBatchBytes = 16 << 20;

RequestError too_long(RequestId line) {
  return {line, std::nullopt,
          fmt::format("line {}: longer than {} MiB, the most that is read", line.n,
                      kLongestLine / kMiB),
          "", "line_too_long"};
}

struct BatchLine : RequestLines::Line {
  std::string chat_entry;  // empty: none
};

std::vector<BatchLine> next_batch(RequestLines& lines, ChatPrompts& prompts) {
  std::vector<BatchLine> batch;
  std::size_t bytes = 0;
  while (batch.size() < kBatchLines && bytes < kBatchBytes) {
    auto line = lines.next();
    if (!line) {
      break;
    }
    std::string entry = prompts.of(line->number);
    bytes += line->text.size() + entry.size();
    batch.push_back({std::move(*line), std::move(entry)});
  }
  return batch;
}

// Every line on whichever thread is free; the outcomes stand in the lines' order.
std::vector<ParsedLine> parse_batch(std::vector<BatchLine>& batch, const RequestRules& rules,
                                    std::size_t threads) {
  std::vector<ParsedLine> parsed(batch.size());
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < batch.size(); i = next++) {
      BatchLine& line = batch[i];
      parsed[i] = line.too_long ? ParsedLine(too_long(line.number))
                                : parse_request(line.number, line.text, rules, line.chat_entry);
      line.text = line.chat_entry = {};
      note_progress();
    }
  };
  std::vector<std::future<void>> others;
  for (std::size_t i = 1; i < std::min(threads, batch.size()); ++i) {
    others.push_back(std::async(std::launch::async, work));
  }
  work();
  std::ranges::for_each(others, [](std::future<void>& other) { other.get(); });
  return parsed;
}

// The first line to use a custom_id has it, even if that line is itself in error.
class CustomIds {
 public:
  // The line that has `custom_id`; `line` itself if it is the first.
  RequestId first_user(const std::string& custom_id, RequestId line) {
    return first_.try_emplace(custom_id, line).first->second;
  }

 private:
  std::unordered_map<std::string, RequestId> first_;
};

RequestError duplicate(RequestId line, std::string custom_id, RequestId first) {
  return {line, std::move(custom_id),
          fmt::format("\"custom_id\" is the same as on line {}; each line needs its own", first.n),
          "custom_id", "duplicate_custom_id"};
}

}  // namespace

std::size_t RequestFile::answerable() const {
  return static_cast<std::size_t>(std::ranges::count(requests, 0, &Request::choice));
}

std::vector<RequestId> RequestFile::line_numbers() const {
  std::vector<RequestId> answered, failed, all;
  for (const Request& request : requests) {
    if (request.choice == 0) {
      answered.push_back(request.id);
    }
  }
  std::ranges::transform(errors, std::back_inserter(failed), &RequestError::line);
  std::ranges::merge(answered, failed, std::back_inserter(all));
  return all;
}

RequestFile read_requests(const std::filesystem::path& path, const RequestRules& rules, int threads,
                          const std::optional<std::filesystem::path>& chat_prompts) {
  check(rules.context > 0 && rules.vocab_size > 0, "a model has a context and a vocabulary");
  const std::size_t workers = threads > 0
                                  ? static_cast<std::size_t>(threads)
                                  : std::max<std::size_t>(1, std::thread::hardware_concurrency());
  RequestFile file;
  Sha256 digest;
  CustomIds custom_ids;
  RequestLines lines(path, kLongestLine,
                     [&](std::span<const std::byte> bytes) { digest.update(bytes); });
  const auto keep = [&](RequestError error) {
    if (error.custom_id && error.param != "custom_id") {
      const RequestId first = custom_ids.first_user(*error.custom_id, error.line);
      if (first != error.line) {
        error = duplicate(error.line, *std::move(error.custom_id), first);
      }
    }
    file.errors.push_back(std::move(error));
  };
  ChatPrompts prompts(chat_prompts);
  std::uint32_t further = kFirstFurtherChoice;
  for (auto batch = next_batch(lines, prompts); !batch.empty();
       batch = next_batch(lines, prompts)) {
    for (ParsedLine& parsed : parse_batch(batch, rules, workers)) {
      if (auto* error = std::get_if<RequestError>(&parsed)) {
        keep(std::move(*error));
        continue;
      }
      Request& request = std::get<Request>(parsed);
      const RequestId first = custom_ids.first_user(request.custom_id, request.id);
      if (first == request.id) {
        add_choices(std::move(request), [&] { return RequestId{further++}; }, file.requests);
      } else {
        file.errors.push_back(duplicate(request.id, request.custom_id, first));
      }
    }
  }
  file.digest = to_hex(digest.finish());
  prompts.check_input(file.digest);
  return file;
}

}  // namespace poise
