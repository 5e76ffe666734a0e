package state

import (
	"testing"
)

func TestLightest_finds_the_window_with_the_least_data(t *testing.T) {
	for name, tt := range map[string]struct {
		sizes        []int64
		window, want int
	}{
		"at the beginning":   {[]int64{1, 1, 9, 9}, 2, 0},
		"in the middle":      {[]int64{9, 1, 2, 9}, 2, 1},
		"at the end":         {[]int64{9, 9, 1, 1}, 2, 2},
		"the last of equals": {[]int64{0, 0, 0, 0, 0}, 2, 3},
		"all":                {[]int64{3, 2, 1}, 3, 0},
		"small over large":   {[]int64{100, 1, 1, 1, 1}, 3, 2},
	} {
		if got := Lightest(tt.sizes, tt.window); got != tt.want {
			t.Errorf("%s: %d, want %d", name, got, tt.want)
		}
	}
}
