package process

import (
	"os"
	"testing"
)

func TestServeProcess_without_what_a_launcher_gives_makes_nothing(t *testing.T) {
	for name, args := range map[string][]string{
		"nothing":            {},
		"no state directory": {"-order", `{"name":"a"}`},
		"no order":           {"-state", "."},
		"an order of no VM":  {"-state", ".", "-order", "{}"},
		"help":               {"--help"},
		"one word too many":  {"-state", ".", "-order", `{"name":"a"}`, "b"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			if err := ServeProcess(t.Context(), args); err == nil {
				t.Error("it runs")
			}
			if made, err := os.ReadDir("."); err != nil || len(made) != 0 {
				t.Errorf("it has made %v, %v", made, err)
			}
		})
	}
}
