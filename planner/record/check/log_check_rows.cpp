// MiniBatchCheck's second half: whose rows stand where, as sequences read, write, attend and store them.

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "planner/record/check/log_check_batch.h"

namespace poise {
namespace {

constexpr TokenId kUnknownToken = -1;  // of a position from before the log begins

std::string told(const CheckedRow& row) {
  return row.request == 0 ? "it was never written"
                          : fmt::format("it holds position {} of request {}, token {}",
                                        row.position, row.request, row.token);
}

bool agrees(const CheckedRow& found, const CheckedRow& wanted) {
  const bool known = found.token != kUnknownToken && wanted.token != kUnknownToken;
  return found.position == wanted.position && (found.token == wanted.token || !known);
}

// What is wrong with the length of a prompt, which the text keeps; nothing if it is not wrong.
std::optional<std::string> take_prompt(std::uint32_t prompt, CheckedText& text) {
  const std::optional<std::uint32_t> before = std::exchange(text.prompt, prompt);
  return before && *before != prompt
             ? std::optional(fmt::format("its prompt has {} tokens, it had {}", prompt, *before))
             : std::nullopt;
}

// What is wrong with the tokens that a sequence takes over, which the text keeps. `late`: the log begins late.
std::optional<std::string> take_over(const messages::TakenOverT& taken,
                                     const messages::Sequence& sequence, bool late,
                                     CheckedText& text) {
  const std::uint64_t end = std::uint64_t{taken.position} + taken.tokens.size();
  if (end > sequence.context()) {
    return fmt::format("{} tokens are taken over from position {} on, its context has {}",
                       taken.tokens.size(), taken.position, sequence.context());
  }
  if (taken.position > text.size() && (!late || text.sampled)) {
    return fmt::format("tokens are taken over from position {} on, {} are known", taken.position,
                       text.size());
  }
  text.resize(std::max<std::size_t>(text.size(), taken.position));
  for (std::size_t i = 0; i < taken.tokens.size(); ++i) {
    const std::size_t position = taken.position + i;
    const TokenId known = text.at(position);
    if (known != kUnknownToken && known != taken.tokens[i]) {
      return fmt::format("token {} is taken over at position {}, it was {}", taken.tokens[i],
                         position, known);
    }
    text.set(position, taken.tokens[i]);
  }
  return std::nullopt;
}

// Whether the row found is the one that the request has there, or would have: another one's with the same text.
bool is_right(const CheckedRow& found, const CheckedRow& wanted, bool late, CheckedText& text) {
  if (found.request == wanted.request || !agrees(found, wanted)) {
    return found.request == wanted.request && agrees(found, wanted);
  }
  const std::uint64_t digest = text.digest(wanted.position);
  const bool known = found.text != 0 && digest != 0;
  return found.request != 0 && (known ? found.text == digest : late);
}

// What is wrong with a sequence that goes without a block; nothing if no row sees it. Its first row sees the most
// of what lies behind: itself and the window's other tokens.
std::optional<std::string> wrong_to_drop(const messages::Sequence& sequence, std::uint32_t block,
                                         std::int64_t window) {
  if (window == 0) {
    return fmt::format("its block {} is dropped, but not all layers have a window", block);
  }
  const std::int64_t first_seen = std::int64_t{sequence.context()} + 1 - window;
  return (std::int64_t{block} + 1) * kBlockTokens > first_seen
             ? std::optional(fmt::format("its block {} is dropped, but position {} is seen", block,
                                         std::max<std::int64_t>(first_seen, 0)))
             : std::nullopt;
}

// The first token of an answer follows the prompt; one that was begun before may go on.
bool may_be_sampled(std::uint64_t end, const CheckedText& text, bool begun_before) {
  return !text.prompt || end == *text.prompt ||
         (end > *text.prompt && (text.sampled || begun_before));
}

}  // namespace

void MiniBatchCheck::read_texts() {
  for (const auto& taken : batch_.taken_over) {
    if (taken->sequence >= batch_.sequences.size()) {
      violation(fmt::format("tokens are taken over by sequence {} of {}", taken->sequence,
                            batch_.sequences.size()));
      continue;
    }
    const messages::Sequence& sequence = batch_.sequences[taken->sequence];
    if (const auto wrong =
            take_over(*taken, sequence, log_.late_, log_.texts_[sequence.request()])) {
      log_.violation(at(taken->sequence), *wrong);
    }
  }
  for (std::uint32_t i = 0; i < batch_.sequences.size(); ++i) {
    const messages::Sequence& sequence = batch_.sequences[i];
    CheckedText& text = log_.texts_[sequence.request()];
    texts_.push_back(&text);
    const bool begun_before = log_.late_ && !text.sampled;
    if (sequence.context() > text.size() && begun_before) {
      text.resize(sequence.context());
    }
    if (sequence.context() > text.size()) {
      log_.violation(at(i), fmt::format("{} tokens of context, {} are known", sequence.context(),
                                        text.size()));
      text.resize(sequence.context());
    }
    read_text(sequence, i, text);
    if (i < batch_.prompt_tokens.size()) {
      if (const auto wrong = take_prompt(batch_.prompt_tokens[i], text)) {
        log_.violation(at(i), *wrong);
      }
    }
  }
}

// Rows continue their request's text.
void MiniBatchCheck::read_text(const messages::Sequence& sequence, std::uint32_t index,
                               CheckedText& text) {
  for (std::uint32_t j = 0; j < sequence.new_tokens(); ++j) {
    const std::size_t position = std::size_t{sequence.context()} + j;
    const TokenId token = batch_.tokens[std::size_t{sequence.first_row()} + j];
    if (position < text.size() && text.at(position) == token) {
      continue;
    }
    if (log_.late_ && position < text.size() && text.at(position) == kUnknownToken) {
      text.set(position, token);
      continue;
    }
    const bool reopened = log_.reopened_.contains(sequence.request());
    if (reopened || (position == text.size() && !text.sampled)) {
      text.resize(position);
      text.push(token);
      continue;
    }
    log_.violation(at(index), position < text.size()
                                  ? fmt::format("position {} is token {}, it was {}", position,
                                                token, text.at(position))
                                  : fmt::format("position {} is token {}, which was never sampled",
                                                position, token));
    text.resize(std::max(text.size(), position + 1));
    text.set(position, token);
  }
}

void MiniBatchCheck::place_new_rows() {
  for (std::uint32_t i = 0; i < batch_.sequences.size(); ++i) {
    const messages::Sequence& sequence = batch_.sequences[i];
    const auto entries = entries_of(batch_, sequence);
    for (std::uint32_t position = sequence.context(); position < end_of(sequence); ++position) {
      const std::uint32_t block = position / kBlockTokens;
      Slot* slot = slot_of(entries[block]);
      if (slot == nullptr) {
        continue;
      }
      const bool act = entries[block].where() == messages::Where::Activation;
      CheckedRow& row = (act ? slot->act : slot->rows)[position % kBlockTokens];
      if (row.request != 0) {
        log_.violation(at(i),
                       fmt::format("its position {} goes to a row of slot {} that is taken: {}",
                                   position, entries[block].slot(), told(row)));
      }
      row = {sequence.request(), position, texts_[i]->at(position), texts_[i]->digest(position)};
    }
  }
}

const CheckedBlock* MiniBatchCheck::read_through(const messages::AttentionEntry& entry) {
  if (entry.where() == messages::Where::HostInPlace) {
    return log_.memory_.find(name_of(entry));
  }
  const Slot* slot = slot_of(entry);
  return slot == nullptr                                ? nullptr
         : entry.where() == messages::Where::Activation ? &slot->act
                                                        : &slot->rows;
}

bool MiniBatchCheck::is_trusted(const messages::AttentionEntry& entry, const CheckedRow& found) {
  const Slot* slot = slot_of(entry);
  const bool there = entry.where() == messages::Where::HostInPlace ||
                     (slot != nullptr && slot->loaded &&
                      (entry.where() != messages::Where::RegeneratedKv || slot->made));
  return log_.late_ && there && found.request == 0;
}

void MiniBatchCheck::attend() {
  for (std::uint32_t i = 0; i < batch_.sequences.size(); ++i) {
    const messages::Sequence& sequence = batch_.sequences[i];
    const auto entries = entries_of(batch_, sequence);
    for (std::uint32_t block = 0; block < entries.size(); ++block) {
      attend(sequence, i, block);
    }
    log_.report_.rows_read += end_of(sequence);
  }
}

void MiniBatchCheck::attend(const messages::Sequence& sequence, std::uint32_t index,
                            std::uint32_t block) {
  const messages::AttentionEntry& entry = batch_.entries[sequence.first_entry() + block];
  if (entry.place() == messages::Place::Dropped) {
    if (const auto wrong = wrong_to_drop(sequence, block, log_.window_)) {
      log_.violation(at(index), *wrong);
    }
    return;
  }
  const auto name = [&] {
    return is_kept(entry) ? to_text(name_of(entry)) : fmt::format("slot {}", entry.slot());
  };
  const std::uint32_t first = block * kBlockTokens;
  const Slot* slot = slot_of(entry);
  if (slot != nullptr && slot->loaded && is_kept(entry) && *slot->loaded != name_of(entry)) {
    log_.violation(at(index), fmt::format("reads {} from slot {}, which {} is loaded to", name(),
                                          entry.slot(), to_text(*slot->loaded)));
    return;
  }
  if (entry.where() == messages::Where::HostInPlace) {
    log_.order_->read(name_of(entry), number_);
    const auto stored = log_.order_->stored.find(name_of(entry));
    if (stored != log_.order_->stored.end() && !log_.order_->on_host.contains(stored->second)) {
      log_.violation(at(index), fmt::format("host cores read {}, to which the device stores rows of "
                                            "mini-batch {} in this iteration",
                                            name(), stored->second));
      return;
    }
  }
  const CheckedBlock* rows = read_through(entry);
  const auto end =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(end_of(sequence), first + kBlockTokens));
  for (std::uint32_t position = first; position < end; ++position) {
    if (entry.where() == messages::Where::HostInPlace && position >= sequence.context()) {
      continue;  // its own rows are stored there by now
    }
    const CheckedRow wanted{sequence.request(), position, texts_[index]->at(position), 0};
    const CheckedRow found = rows == nullptr ? CheckedRow{} : (*rows)[position - first];
    if (is_trusted(entry, found) && position < sequence.context()) {
      ++log_.report_.trusted_rows;
      continue;
    }
    if (!is_right(found, wanted, log_.late_, *texts_[index])) {
      log_.violation(at(index), fmt::format("reads position {} (token {}) from {}: {}", position,
                                            wanted.token, name(), told(found)));
      return;
    }
  }
}

void MiniBatchCheck::store() {
  std::vector<bool> stored(batch_.tokens.size());
  for (const messages::Store& store : batch_.stores) {
    const CheckedBlockName name = name_of(store);
    log_.order_->stored[name] = number_;
    for (std::uint32_t i = 0; i < store.count(); ++i) {
      const std::size_t row = std::size_t{store.row()} + i;
      if (row >= sequence_of_row_.size() || row >= stored.size() || stored[row]) {
        violation(fmt::format("row {} is stored to {}, {}", row, to_text(name),
                              row < stored.size() ? "after it was stored" : "there is none"));
        break;
      }
      stored[row] = true;
      const std::uint32_t index = sequence_of_row_[row];
      const messages::Sequence& sequence = batch_.sequences[index];
      const auto position =
          static_cast<std::uint32_t>(sequence.context() + row - sequence.first_row());
      const auto entries = entries_of(batch_, sequence);
      const std::uint32_t token = store.token() + i;
      const std::uint32_t block = position / kBlockTokens;
      if (takes_part(batch_, index, block)) {
        log_.violation(at(index), fmt::format("position {} is stored to {}, which is another's",
                                              position, to_text(name)));
      }
      if (block >= entries.size() || name_of(entries[block]) != name ||
          token != position % kBlockTokens) {
        log_.violation(
            at(index),
            fmt::format("position {} is stored to token {} of {}, it belongs to token {} "
                        "of {}",
                        position, token, to_text(name), position % kBlockTokens,
                        block < entries.size() ? to_text(name_of(entries[block])) : "no entry"));
      }
      if (token >= static_cast<std::uint32_t>(kBlockTokens)) {
        continue;
      }
      log_.memory_.at(name)[token] = {sequence.request(), position, texts_[index]->at(position),
                                      texts_[index]->digest(position)};
      ++log_.report_.rows_stored;
    }
  }
  for (std::size_t row = 0; row < std::min(stored.size(), sequence_of_row_.size()); ++row) {
    const std::uint32_t index = sequence_of_row_[row];
    const messages::Sequence& sequence = batch_.sequences[index];
    const std::size_t position = sequence.context() + row - sequence.first_row();
    const auto entries = entries_of(batch_, sequence);
    const std::size_t block = position / static_cast<std::size_t>(kBlockTokens);
    if (!stored[row] && block < entries.size() && is_kept(entries[block]) &&
        !takes_part(batch_, index, block)) {
      log_.violation(at(index), fmt::format("position {} is stored nowhere, it belongs to {}",
                                            position, to_text(name_of(entries[block]))));
    }
  }
}

void MiniBatchCheck::check_samples() {
  for (const auto& sample : batch_.samples) {
    if (sample->sequence >= batch_.sequences.size()) {
      violation(fmt::format("a sample is of sequence {} of {}", sample->sequence,
                            batch_.sequences.size()));
      continue;
    }
    const messages::Sequence& sequence = batch_.sequences[sample->sequence];
    if (!log_.order_->samples.emplace(sequence.request(), sample->generate).second) {
      log_.violation(at(sample->sequence), "it is sampled twice");
    }
    if (!sample->mask.empty()) {
      log_.order_->masks.emplace(sequence.request(), sample->mask);
    }
    CheckedText& text = *texts_[sample->sequence];
    const bool begun_before = log_.late_ || log_.reopened_.contains(sequence.request());
    if (sample->generate && !may_be_sampled(end_of(sequence), text, begun_before)) {
      log_.violation(at(sample->sequence),
                     fmt::format("it is sampled behind token {}, its prompt has {}",
                                 end_of(sequence), *text.prompt));
    }
    if (sample->generate && log_.reopened_.erase(sequence.request()) != 0) {
      text.resize(end_of(sequence));
    }
    const std::size_t known = text.size();
    if (sample->generate && end_of(sequence) != known) {
      log_.violation(at(sample->sequence),
                     fmt::format("it is sampled behind token {} of {}", end_of(sequence), known));
    }
  }
}

}  // namespace poise
