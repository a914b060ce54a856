// SPDX-License-Identifier: Apache-2.0
// The template is never executed: its form is recognised, and the details in which templates of one form differ (blanks,
// trimming, a default system message) are read from it. Text between two control tokens is tokenised in one go and always as
// text.
#include "engine/text/chat_template.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "engine/text/utf8.h"
#include "manifests/check.h"

namespace rubato::text {
namespace {

constexpr std::string_view llama3_markers[] = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
constexpr std::string_view chatml_markers[] = {"<|im_start|>", "<|im_end|>"};

std::string_view template_of(const Tokenizer& tokenizer) {
  return tokenizer.chat_template() ? std::string_view(*tokenizer.chat_template()) : std::string_view();
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// Whether the template passes message contents through Jinja's trim: `content | trim`, `message['content']|trim` and so on.
bool trims_content(std::string_view source) {
  constexpr std::string_view word = "content";
  for (std::size_t at = source.find(word); at != std::string_view::npos; at = source.find(word, at + 1)) {
    std::string_view rest = source.substr(at + word.size());
    rest.remove_prefix(std::min(rest.find_first_not_of("'\"] )"), rest.size()));
    if (!rest.starts_with('|')) continue;
    rest.remove_prefix(1);
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    if (rest.starts_with("trim")) return true;
  }
  return false;
}

template <std::size_t Count>
Result<ChatForm> with_markers(const Tokenizer& tokenizer, ChatForm form, const std::string_view (&markers)[Count]) {
  for (const std::string_view marker : markers) {
    if (!tokenizer.id_of(marker)) {
      return unexpected(ErrorCode::InvalidArgument,
                        "chat_template uses `" + std::string(marker) + "`, which is no token of tokenizer.json");
    }
  }
  return form;
}

enum class Role : std::uint8_t { System, User, Assistant };

std::string in_backticks(std::string_view text) {
  std::string out(1, '`');
  out += text;
  out += '`';
  return out;
}

std::string field_of(std::size_t index, std::string_view member) {
  return "messages[" + std::to_string(index) + "]." + std::string(member);
}

/// A checked message. content is valid UTF-8 and borrowed from the caller's.
struct Turn {
  Role role = Role::User;
  std::string_view content;
};

Result<std::vector<Turn>> check_messages(const std::vector<ChatMessage>& messages) {
  if (messages.empty()) return unexpected(ErrorCode::InvalidArgument, "messages", "messages is empty: at least one is needed");
  std::vector<Turn> turns;
  turns.reserve(messages.size());
  for (std::size_t index = 0; index < messages.size(); ++index) {
    const auto& [role, content] = messages[index];
    if (const auto invalid = find_invalid_utf8(content)) {
      return unexpected(ErrorCode::InvalidArgument, field_of(index, "content"),
                        "not valid UTF-8 at byte " + std::to_string(*invalid));
    }
    if (role == "system" || role == "developer") {
      turns.push_back({Role::System, content});
    } else if (role == "user") {
      turns.push_back({Role::User, content});
    } else if (role == "assistant") {
      turns.push_back({Role::Assistant, content});
    } else {
      const std::string shown = find_invalid_utf8(role) || role.size() > 64 ? std::string("this role") : in_backticks(role);
      return unexpected(ErrorCode::InvalidArgument, field_of(index, "role"),
                        shown + " is none of system, developer, user, assistant");
    }
  }
  return turns;
}

std::string_view name_of(Role role) {
  switch (role) {
    case Role::System:
      return "system";
    case Role::User:
      return "user";
    case Role::Assistant:
      return "assistant";
  }
  return {};
}

/// Collects text and control tokens; a control token ends the text before it.
class PromptBuilder {
 public:
  explicit PromptBuilder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void text(std::string_view part) { pending_ += part; }

  /// A marker that the form needs: detect_chat_form has seen that it exists.
  void control(std::string_view marker) {
    const std::optional<TokenId> id = tokenizer_.id_of(marker);
    CHECK(id.has_value(), "no token ", marker);
    control(*id);
  }
  void control(TokenId id) {
    flush();
    ids_.push_back(id);
  }
  /// A control token where the vocabulary has one, else its spelling as text (Mistral's first tokenizers).
  void control_or_text(std::string_view marker) {
    const std::optional<TokenId> id = tokenizer_.id_of(marker);
    if (id) {
      control(*id);
    } else {
      text(marker);
    }
  }
  void begin_token() {
    if (tokenizer_.begin_token()) control(*tokenizer_.begin_token());
  }

  Result<std::vector<TokenId>> finish() {
    flush();
    if (error_) return Unexpected(*std::move(error_));
    return std::move(ids_);
  }

 private:
  void flush() {
    if (pending_.empty() || error_) return;
    Result<std::vector<TokenId>> encoded = tokenizer_.encode(pending_, SpecialTokens::AsText, BeginToken::None);
    pending_.clear();
    if (encoded) {
      ids_.insert(ids_.end(), encoded->begin(), encoded->end());
    } else {
      error_ = std::move(encoded).error();
      error_->field = "messages";
    }
  }

  const Tokenizer& tokenizer_;
  std::string pending_;
  std::vector<TokenId> ids_;
  std::optional<Error> error_;
};

void render_llama3(const Tokenizer& tokenizer, const std::vector<Turn>& turns, PromptBuilder& prompt) {
  const bool trims = trims_content(template_of(tokenizer));
  prompt.begin_token();
  const auto header = [&](Role role) {
    prompt.control("<|start_header_id|>");
    prompt.text(name_of(role));
    prompt.control("<|end_header_id|>");
    prompt.text("\n\n");
  };
  for (const Turn& turn : turns) {
    header(turn.role);
    prompt.text(trims ? trim_spaces(turn.content) : turn.content);
    prompt.control("<|eot_id|>");
  }
  header(Role::Assistant);
}

/// Some ChatML templates put a fixed system message in front of a chat that has none: the literal text between the markers, where
/// the template has it in one piece.
std::string_view default_system_message(std::string_view source) {
  constexpr std::string_view opening = "<|im_start|>system";
  for (std::size_t at = source.find(opening); at != std::string_view::npos; at = source.find(opening, at + 1)) {
    std::string_view rest = source.substr(at + opening.size());
    if (rest.starts_with("\\n")) {
      rest.remove_prefix(2);
    } else if (rest.starts_with('\n')) {
      rest.remove_prefix(1);
    } else {
      continue;
    }
    const std::string_view message = rest.substr(0, rest.find("<|im_end|>"));
    if (message.size() < rest.size() && !message.empty() && message.find_first_of("'\"{}\\+") == std::string_view::npos)
      return message;
  }
  return {};
}

void render_chatml(const Tokenizer& tokenizer, const std::vector<Turn>& turns, PromptBuilder& prompt) {
  const std::string_view source = template_of(tokenizer);
  if (contains(source, "bos_token")) prompt.begin_token();
  const auto open = [&](Role role) {
    prompt.control("<|im_start|>");
    prompt.text(name_of(role));
    prompt.text("\n");
  };
  const auto turn_of = [&](Role role, std::string_view content) {
    open(role);
    prompt.text(content);
    prompt.control("<|im_end|>");
    prompt.text("\n");
  };
  const std::string_view preset = default_system_message(source);
  if (!preset.empty() && turns.front().role != Role::System) turn_of(Role::System, preset);
  const bool trims = trims_content(source);
  for (const Turn& turn : turns) turn_of(turn.role, trims ? trim_spaces(turn.content) : turn.content);
  open(Role::Assistant);
}

/// Mistral's form has no system turn: system messages in front are put before a user message. User and assistant alternate, and
/// the user speaks last.
Result<void> check_mistral_order(const std::vector<Turn>& turns, std::size_t first) {
  for (std::size_t index = first; index < turns.size(); ++index) {
    const Role expected = (index - first) % 2 == 0 ? Role::User : Role::Assistant;
    if (turns[index].role != expected) {
      return unexpected(ErrorCode::InvalidArgument, field_of(index, "role"),
                        in_backticks(name_of(turns[index].role)) + " stands where this model's chat template needs " +
                            in_backticks(name_of(expected)) + ": system messages first, then user and assistant in turn");
    }
  }
  if (turns.size() == first || turns.back().role != Role::User) {
    return unexpected(ErrorCode::InvalidArgument, field_of(turns.size() - 1, "role"),
                      "this model's chat template needs a user message last");
  }
  return {};
}

/// The details in which Mistral's templates differ, read from the template text.
struct MistralStyle {
  bool blank_after_open = false;    // `[INST] `
  bool blank_before_close = false;  // ` [/INST]`
  bool blank_before_answer = false;
  bool trims = false;
  bool system_in_last_turn = false;
};

MistralStyle mistral_style(std::string_view source) {
  return {.blank_after_open = contains(source, "[INST] "),
          .blank_before_close = contains(source, " [/INST]"),
          .blank_before_answer =
              contains(source, "' ' + message") || contains(source, "\" \" + message") || contains(source, "[/INST] "),
          .trims = trims_content(source),
          .system_in_last_turn = contains(source, "loop.last") || contains(source, "[-1]")};
}

Result<void> render_mistral(const Tokenizer& tokenizer, const std::vector<Turn>& turns, PromptBuilder& prompt) {
  const MistralStyle style = mistral_style(template_of(tokenizer));
  std::size_t first = 0;
  std::string system;
  for (; first < turns.size() && turns[first].role == Role::System; ++first) {
    system += turns[first].content;
    system += "\n\n";
  }
  if (auto order = check_mistral_order(turns, first); !order) return order;
  const std::size_t system_turn = style.system_in_last_turn ? turns.size() - 1 : first;
  prompt.begin_token();
  for (std::size_t index = first; index < turns.size(); ++index) {
    const std::string_view content = style.trims ? trim_spaces(turns[index].content) : turns[index].content;
    if (turns[index].role == Role::User) {
      prompt.control_or_text("[INST]");
      if (style.blank_after_open) prompt.text(" ");
      if (index == system_turn) prompt.text(system);
      prompt.text(content);
      if (style.blank_before_close) prompt.text(" ");
      prompt.control_or_text("[/INST]");
    } else {
      if (style.blank_before_answer) prompt.text(" ");
      prompt.text(content);
      if (tokenizer.end_token()) prompt.control(*tokenizer.end_token());
    }
  }
  return {};
}

Result<std::vector<TokenId>> render_plain(const Tokenizer& tokenizer, const std::vector<Turn>& turns) {
  std::string text;
  for (const Turn& turn : turns) {
    text += name_of(turn.role);
    text += ": ";
    text += turn.content;
    text += '\n';
  }
  text += "assistant:";
  Result<std::vector<TokenId>> ids = tokenizer.encode(text, SpecialTokens::AsText, BeginToken::AsConfigured);
  if (ids) return ids;
  Error error = std::move(ids).error();
  error.field = "messages";
  return Unexpected(std::move(error));
}

}  // namespace

Result<ChatForm> detect_chat_form(const Tokenizer& tokenizer) {
  if (!tokenizer.chat_template()) return ChatForm::Plain;
  const std::string_view source = template_of(tokenizer);
  if (contains(source, "<|start_header_id|>")) return with_markers(tokenizer, ChatForm::Llama3, llama3_markers);
  if (contains(source, "<|im_start|>")) return with_markers(tokenizer, ChatForm::ChatMl, chatml_markers);
  // Llama 2 shares [INST] but has a system block of its own, and newer Mistral templates a system token.
  const bool other = contains(source, "<<SYS>>") || contains(source, "[SYSTEM_PROMPT]");
  if (contains(source, "[INST]") && contains(source, "[/INST]") && !other) return ChatForm::Mistral;
  return unexpected(
      ErrorCode::InvalidArgument,
      "chat_template is of none of the supported forms: Llama-3 (<|start_header_id|>), ChatML (<|im_start|>), Mistral "
      "([INST] without a system block)");
}

Result<std::vector<TokenId>> render_chat(const Tokenizer& tokenizer, ChatForm form, const std::vector<ChatMessage>& messages) {
  Result<std::vector<Turn>> turns = check_messages(messages);
  if (!turns) return Unexpected(std::move(turns).error());
  PromptBuilder prompt(tokenizer);
  switch (form) {
    case ChatForm::Llama3:
      render_llama3(tokenizer, *turns, prompt);
      break;
    case ChatForm::ChatMl:
      render_chatml(tokenizer, *turns, prompt);
      break;
    case ChatForm::Mistral:
      if (auto rendered = render_mistral(tokenizer, *turns, prompt); !rendered) return Unexpected(std::move(rendered).error());
      break;
    case ChatForm::Plain:
      return render_plain(tokenizer, *turns);
  }
  return prompt.finish();
}

std::vector<TokenId> chat_end_tokens(const Tokenizer& tokenizer, ChatForm form) {
  std::vector<TokenId> ids;
  const auto add = [&](std::string_view marker) {
    if (const auto id = tokenizer.id_of(marker)) ids.push_back(*id);
  };
  switch (form) {
    case ChatForm::Llama3:
      add("<|eot_id|>");
      add("<|eom_id|>");
      break;
    case ChatForm::ChatMl:
      add("<|im_end|>");
      break;
    case ChatForm::Mistral:
      if (tokenizer.end_token()) ids.push_back(*tokenizer.end_token());
      break;
    case ChatForm::Plain:
      break;
  }
  return ids;
}

}  // namespace rubato::text
