package process

import (
	"testing"
)

func TestWarmUp_does_all_of_it(t *testing.T) {
	t.Parallel()
	if err := warmUp(); err != nil {
		t.Error(err)
	}
}
