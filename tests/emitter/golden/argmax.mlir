// castiron emit --kernel argmax --shape 512 --isa avx2 --threads 2
// 110 lines, sha256 091363353991284e63911b8e7b4b937095b6ee4b27bcdec92ec3e87484dce443
stream.executable private @argmax_512_avx2_b512 {
  stream.executable.export public @argmax_512_avx2_b512_fn workgroups() -> (index, index, index) {
    %n = arith.constant 1 : index
    %one = arith.constant 1 : index
    stream.return %n, %one, %one : index, index, index
  }
  builtin.module {
    func.func @argmax_512_avx2_b512_fn(%b0: !stream.binding, %b1: !stream.binding) attributes {translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 0xFF800000 : f32
      %c2 = arith.constant 512 : index
      %c3 = arith.constant dense<0xFF800000> : vector<8xf32>
      %c4 = arith.constant 64 : index
      %c5 = arith.constant 8 : index
      %c6 = arith.constant 16 : index
      %c7 = arith.constant 24 : index
      %c8 = arith.constant 32 : index
      %c9 = arith.constant 40 : index
      %c10 = arith.constant 48 : index
      %c11 = arith.constant 56 : index
      %c12 = arith.constant 1 : index
      %m0 = stream.binding.subspan %b0[%c0] : !stream.binding -> memref<512xf32>
      %m1 = stream.binding.subspan %b1[%c0] : !stream.binding -> memref<i32>
      %4:2 = scf.for %1 = %c0 to %c2 step %c2 iter_args(%2 = %c1, %3 = %c0) -> (f32, index) {
        %5 = arith.addi %1, %c2 : index
        %15:8 = scf.for %6 = %1 to %5 step %c4 iter_args(%7 = %c3, %8 = %c3, %9 = %c3, %10 = %c3, %11 = %c3, %12 = %c3, %13 = %c3, %14 = %c3) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
          %16 = arith.addi %6, %c5 : index
          %17 = arith.addi %6, %c6 : index
          %18 = arith.addi %6, %c7 : index
          %19 = arith.addi %6, %c8 : index
          %20 = arith.addi %6, %c9 : index
          %21 = arith.addi %6, %c10 : index
          %22 = arith.addi %6, %c11 : index
          %23 = vector.load %m0[%6] : memref<512xf32>, vector<8xf32>
          %24 = arith.cmpf ogt, %23, %7 : vector<8xf32>
          %25 = arith.select %24, %23, %7 : vector<8xi1>, vector<8xf32>
          %26 = vector.load %m0[%16] : memref<512xf32>, vector<8xf32>
          %27 = arith.cmpf ogt, %26, %8 : vector<8xf32>
          %28 = arith.select %27, %26, %8 : vector<8xi1>, vector<8xf32>
          %29 = vector.load %m0[%17] : memref<512xf32>, vector<8xf32>
          %30 = arith.cmpf ogt, %29, %9 : vector<8xf32>
          %31 = arith.select %30, %29, %9 : vector<8xi1>, vector<8xf32>
          %32 = vector.load %m0[%18] : memref<512xf32>, vector<8xf32>
          %33 = arith.cmpf ogt, %32, %10 : vector<8xf32>
          %34 = arith.select %33, %32, %10 : vector<8xi1>, vector<8xf32>
          %35 = vector.load %m0[%19] : memref<512xf32>, vector<8xf32>
          %36 = arith.cmpf ogt, %35, %11 : vector<8xf32>
          %37 = arith.select %36, %35, %11 : vector<8xi1>, vector<8xf32>
          %38 = vector.load %m0[%20] : memref<512xf32>, vector<8xf32>
          %39 = arith.cmpf ogt, %38, %12 : vector<8xf32>
          %40 = arith.select %39, %38, %12 : vector<8xi1>, vector<8xf32>
          %41 = vector.load %m0[%21] : memref<512xf32>, vector<8xf32>
          %42 = arith.cmpf ogt, %41, %13 : vector<8xf32>
          %43 = arith.select %42, %41, %13 : vector<8xi1>, vector<8xf32>
          %44 = vector.load %m0[%22] : memref<512xf32>, vector<8xf32>
          %45 = arith.cmpf ogt, %44, %14 : vector<8xf32>
          %46 = arith.select %45, %44, %14 : vector<8xi1>, vector<8xf32>
          scf.yield %25, %28, %31, %34, %37, %40, %43, %46 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
        }
        %47 = arith.cmpf ogt, %15#0, %15#1 : vector<8xf32>
        %48 = arith.select %47, %15#0, %15#1 : vector<8xi1>, vector<8xf32>
        %49 = arith.cmpf ogt, %15#2, %15#3 : vector<8xf32>
        %50 = arith.select %49, %15#2, %15#3 : vector<8xi1>, vector<8xf32>
        %51 = arith.cmpf ogt, %15#4, %15#5 : vector<8xf32>
        %52 = arith.select %51, %15#4, %15#5 : vector<8xi1>, vector<8xf32>
        %53 = arith.cmpf ogt, %15#6, %15#7 : vector<8xf32>
        %54 = arith.select %53, %15#6, %15#7 : vector<8xi1>, vector<8xf32>
        %55 = arith.cmpf ogt, %48, %50 : vector<8xf32>
        %56 = arith.select %55, %48, %50 : vector<8xi1>, vector<8xf32>
        %57 = arith.cmpf ogt, %52, %54 : vector<8xf32>
        %58 = arith.select %57, %52, %54 : vector<8xi1>, vector<8xf32>
        %59 = arith.cmpf ogt, %56, %58 : vector<8xf32>
        %60 = arith.select %59, %56, %58 : vector<8xi1>, vector<8xf32>
        %61 = vector.shuffle %60, %60 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
        %62 = vector.shuffle %60, %60 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
        %63 = arith.cmpf ogt, %61, %62 : vector<4xf32>
        %64 = arith.select %63, %61, %62 : vector<4xi1>, vector<4xf32>
        %65 = vector.shuffle %64, %64 [0, 1] : vector<4xf32>, vector<4xf32>
        %66 = vector.shuffle %64, %64 [2, 3] : vector<4xf32>, vector<4xf32>
        %67 = arith.cmpf ogt, %65, %66 : vector<2xf32>
        %68 = arith.select %67, %65, %66 : vector<2xi1>, vector<2xf32>
        %69 = vector.shuffle %68, %68 [0] : vector<2xf32>, vector<2xf32>
        %70 = vector.shuffle %68, %68 [1] : vector<2xf32>, vector<2xf32>
        %71 = arith.cmpf ogt, %69, %70 : vector<1xf32>
        %72 = arith.select %71, %69, %70 : vector<1xi1>, vector<1xf32>
        %73 = vector.extract %72[0] : f32 from vector<1xf32>
        %74 = arith.cmpf ogt, %73, %2 : f32
        %75 = arith.select %74, %73, %2 : f32
        %76 = arith.select %74, %1, %3 : index
        scf.yield %75, %76 : f32, index
      }
      %77 = arith.addi %4#1, %c2 : index
      %78 = arith.minsi %77, %c2 : index
      %79 = arith.subi %78, %4#1 : index
      %82:1 = scf.for %80 = %c0 to %79 step %c12 iter_args(%81 = %4#1) -> (index) {
        %83 = arith.subi %78, %c12 : index
        %84 = arith.subi %83, %80 : index
        %85 = memref.load %m0[%84] : memref<512xf32>
        %86 = arith.cmpf oeq, %85, %4#0 : f32
        %87 = arith.select %86, %84, %81 : index
        scf.yield %87 : index
      }
      %88 = arith.cmpf ogt, %4#0, %c1 : f32
      %89 = arith.select %88, %82#0, %c0 : index
      %90 = arith.index_cast %89 : index to i32
      memref.store %90, %m1[] : memref<i32>
      return
    }
  }
}
