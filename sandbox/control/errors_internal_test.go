package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestError_keeps_its_code_and_field_on_the_way(t *testing.T) {
	_, policy := netpolicy.Parse([]byte("rules: [{direction: egress, verdict: allow, ports: [0]}]"))
	for name, tt := range map[string]struct {
		err   error
		is    error
		field string
	}{
		"a policy's":        {fmt.Errorf("setting the policy of a: %w", policy), netpolicy.ErrPolicy, "rules[0].ports[0]"},
		"a specification's": {spec.InField("idle", spec.InField("sleep_seconds", spec.ErrInvalid)), spec.ErrInvalid, "idle.sleep_seconds"},
		"no field's":        {spec.ErrNotRunning, spec.ErrNotRunning, ""},
		"one of no code":    {spec.InField("x", errors.New("other")), nil, "x"},
	} {
		text, err := json.Marshal(ReportError(tt.err))
		if err != nil {
			t.Fatal(err)
		}
		var got ErrorReport
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		if tt.is != nil && !errors.Is(&got, tt.is) || spec.FieldOf(fmt.Errorf("asking: %w", &got)) != tt.field || got.Error() != tt.err.Error() {
			t.Errorf("%s: %s", name, text)
		}
	}
}
