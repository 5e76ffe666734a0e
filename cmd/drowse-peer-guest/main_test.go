package main

import (
	"strings"
	"testing"
)

func TestServe_that_is_no_first_process_gives_error(t *testing.T) {
	if err := serve(0, 0); err == nil || !strings.Contains(err.Error(), "first process") {
		t.Errorf("got %v", err)
	}
}
