# So that `snakemake` alone runs the workflow in this checkout.
include: "workflow/Snakefile"


# An included file cannot say what is made when nothing is asked for.
rule everything:
    default_target: True
    input:
        rules.all.input,
    localrule: True
