# Requires that zsh, with the script of the completions, completes a line to another:
#   timeout 20 zsh -f complete.zsh SCRIPT LINE COMPLETED
# Completion needs a terminal: an interactive zsh in a pseudo-terminal gets the line and a tab. Waits until the line is complete.
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1= ; autoload -Uz compinit; compinit -D -u; source ${(q)1}; compdef _kvatlas kvatlas; print rea''dy"
zpty -r -m shell said '*ready*'
zpty -w -n shell "$2"$'\t'
zpty -r -m shell said "*$3*" && print -r -- "$3"
