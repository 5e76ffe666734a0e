//go:build e2bnode

package e2btest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// model is a language model's server, as far as the recipes need one: it has a command run, and says what came of it.
func model(t *testing.T, asked *atomic.Int32) *httptest.Server {
	const command = "echo answer: $((6*7)) by $(id -un)"
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Messages []struct {
				Role    string
				Content any
			}
			Tools []struct{ Function struct{ Name string } }
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || !strings.HasSuffix(r.URL.Path, "/chat/completions") || len(body.Messages) == 0 || len(body.Tools) != 1 {
			http.Error(w, fmt.Sprintf("%s: %v", r.URL.Path, err), http.StatusBadRequest)
			return
		}
		n := asked.Add(1)
		said, why := map[string]any{"role": "assistant"}, "stop"
		if last := body.Messages[len(body.Messages)-1]; last.Role == "tool" {
			said["content"] = fmt.Sprint("It said: ", last.Content)
		} else {
			arguments, _ := json.Marshal(map[string]string{"command": command}) // of strings
			call := map[string]any{"id": "call_1", "type": "function", "function": map[string]string{"name": body.Tools[0].Function.Name, "arguments": string(arguments)}}
			said["content"], said["tool_calls"], why = nil, []any{call}, "tool_calls"
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{ // an error means that the client has gone
			"id": fmt.Sprint("answer-", n), "object": "chat.completion", "created": 1, "model": "test", "choices": []any{map[string]any{"index": 0, "message": said, "finish_reason": why}},
			"usage": map[string]int{"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
		})
	}))
	t.Cleanup(s.Close)
	return s
}

// Each recipe is a program as a user has it. Only the model is not a real one.
func TestRecipes_of_agent_stacks_run_on_the_unmodified_package_e2b(t *testing.T) {
	if _, err := os.Stat("recipes/node_modules/e2b"); err != nil {
		t.Skip("their npm packages are not installed: make test-recipes")
	}
	w := begin(t, newGuests(t), nil)
	all, err := filepath.Glob("recipes/*.mjs")
	if err != nil || len(all) < 3 {
		t.Fatal(all, err)
	}
	for _, file := range all {
		t.Run(filepath.Base(file), func(t *testing.T) {
			var asked atomic.Int32
			cmd := exec.CommandContext(t.Context(), "node", filepath.Base(file))
			cmd.Dir = "recipes"
			cmd.Env = append(os.Environ(), "E2B_API_KEY="+w.key, "E2B_API_URL="+w.url, "E2B_SANDBOX_URL="+w.url,
				"OPENAI_BASE_URL="+model(t, &asked).URL+"/v1", "OPENAI_API_KEY=none", "MODEL=test")
			out, err := cmd.CombinedOutput()
			if text := strings.TrimSpace(string(out)); err != nil || text != "It said: answer: 42 by user" || asked.Load() != 2 {
				t.Errorf("%v, after %d questions: %s", err, asked.Load(), text)
			}
		})
	}
	if left, err := w.host.State.List(); err != nil || len(left) > 0 {
		t.Errorf("%d sandboxes are left, %v", len(left), err)
	}
}
